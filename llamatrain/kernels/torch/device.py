"""The devices of PyTorch: its memory, its kernels, and recorded graphs of them.

The calls of a step are recorded once as a CUDA graph, which is then launched as a whole. Where torch has no
graphs, or recording fails, each step issues the calls one by one.
"""

import os
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor as Torch

from llamatrain.errors import DeviceError
from llamatrain.graph.fuse import fuse_sums
from llamatrain.graph.precision import Precision, round_results
from llamatrain.graph.tensor import Node, QuantizedType, Tensor
from llamatrain.kernels.quantized import Blocks
from llamatrain.kernels.reference.registry import run_kernel
from llamatrain.kernels.torch import (  # noqa: F401 - each registers its kernels
    GPUS,
    attention,
    convolution,
    elementwise,
    experts,
    losses,
    matmul,
    movement,
    norm,
    optimizer,
    recurrent,
)
from llamatrain.kernels.torch.dequantize import can_decode
from llamatrain.kernels.torch.memory import TorchMemory, View, device_errors, zero_inputs
from llamatrain.kernels.torch.registry import KERNELS, TorchKernel
from llamatrain.platform.terminal import log_line

OLDEST = (2, 8)  # the first version that has all of the operations below
FREE_SHARE = 0.9  # share of the free memory that is the limit by default
WORKSPACE = ":4096:8"  # cuBLAS gives the same bits only with workspaces of fixed size
# of cuBLAS: 32 MiB for the stream that runs calls one by one, and as many for the one that records them
WORKSPACE_BYTES = 64 << 20


def available_gpus() -> list[str]:
    """Return the names of graphics processors that torch can use here."""
    found = {"cuda": torch.cuda, "xpu": getattr(torch, "xpu", None), "mps": torch.backends.mps}
    with warnings.catch_warnings():  # such as that of a driver that is too old
        warnings.simplefilter("ignore")
        return [name for name in GPUS if (library := found[name]) and library.is_available()]


def version_of(text: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(number) for number in text.split(".")[:2])


@cache
def open_device(name: str, threads: int) -> "TorchDevice":
    """Return a device; torch computes the same bits in every run from now on."""
    if version_of(torch.__version__) < OLDEST:
        raise DeviceError(
            f"--device {name} needs PyTorch {'.'.join(map(str, OLDEST))} or newer (got {torch.__version__})",
            code="old-torch",
        )
    if name in GPUS and name not in available_gpus():
        have = ", ".join(available_gpus()) or "none"
        raise DeviceError(
            f"--device {name}: PyTorch {torch.__version__} finds no such processor here (it finds {have}); "
            "use --device cpu, or install a PyTorch for your card",
            code="no-gpu",
        )
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.filterwarnings("ignore", message=".*deterministic")
    torch.utils.deterministic.fill_uninitialized_memory = False
    # products are added up in float32, also if several parts of a sum are computed at once
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return CudaDevice(name, threads) if name == "cuda" else TorchDevice(name, threads)


@dataclass(frozen=True)
class TorchCall:
    """A call of a kernel, and whether it can be recorded."""

    run: Callable[[], None]
    is_recordable: bool = True


class TorchDevice(TorchMemory):
    """A device that issues each call by itself. Ops without a torch kernel run on the host."""

    is_host = False
    reads_ahead = False
    has_int8_products = False

    def __init__(self, name: str, threads: int) -> None:
        super().__init__(name, torch.device(name.removeprefix("torch-")))
        self.threads = threads
        self.library: Any = getattr(torch, self.device.type)
        self.precisions: Sequence[Precision] = ("bf16", "f32") if name in ("cuda", "xpu") else ("f32", "bf16")

    @property
    def kernel_class(self) -> str:
        """The device and torch's version: others may give other bits."""
        return f"{self.name} {self.model} torch {torch.__version__}"

    @property
    def model(self) -> str:
        """The name of the processor."""
        named = getattr(self.library, "get_device_name", None)
        return named() if named and self.name != "torch-cpu" else self.device.type

    def memory_limit(self) -> int | None:
        """Return the bytes that a run may take, or None if the device uses the host's memory."""
        if self.name == "torch-cpu":
            return None
        if self.name == "mps":
            free = torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
        else:
            free = self.library.mem_get_info()[0]
        return int(free * FREE_SHARE)

    def peak_bytes(self) -> int | None:
        """Return the most bytes that torch has held at a time, or None if unknown."""
        if self.name == "torch-cpu":
            return None
        if self.name == "mps":
            return torch.mps.driver_allocated_memory()
        peak: int = self.library.max_memory_allocated()
        return peak

    def resident_bytes(self, sizes: Iterable[int]) -> int:
        """Return the bytes of frozen weights of these sizes, all of which stay on the device."""
        return sum(sizes)

    # ---- kernels -----------------------------------------------------------

    def can_decode(self, dtype: QuantizedType) -> bool:
        """Return True if weights of this type are decoded on the device."""
        return can_decode(dtype.kind)

    def rewrite(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs with fewer nodes that only move memory."""
        return round_results(fuse_sums(outputs))

    def has_kernel(self, node: Node) -> bool:
        """Return True if the op has a kernel here."""
        return node.op.name in KERNELS

    def scratch(self, node: Node) -> int:
        """Return 0: torch allocates what a kernel needs."""
        return 0

    def temporaries(self, node: Node) -> int:
        """Return the bytes that torch allocates while the node runs."""
        found = KERNELS.get(node.op.name)
        return found.temporaries(node) if found else 0

    def bind(self, node: Node, outs: Sequence[View], ins: Sequence[View], scratch: Torch) -> list[TorchCall]:
        """Return the call that computes a node."""
        found = KERNELS.get(node.op.name)
        if found is None:
            return [TorchCall(partial(self.run_on_host, node, outs, ins), is_recordable=False)]
        if found.writes:
            run = partial(found.run, *ins, **node.attrs, out=tuple(outs))
            return [TorchCall(run, found.is_recordable)]
        return [TorchCall(partial(run_and_copy, found, outs, ins, node.attrs))]

    def run_on_host(self, node: Node, outs: Sequence[View], ins: Sequence[View]) -> None:
        """Compute a node by its definition, on copies in the host's memory."""
        arrays = [self.read(place) for place in ins]
        sources = [
            Blocks(place.kind, place.shape, array) if isinstance(place, Blocks) else array
            for place, array in zip(ins, arrays, strict=True)
        ]
        results = [np.empty(output.shape, output.dtype.numpy) for output in node.outputs]
        run_kernel(node.op.name, results, sources, node.attrs)
        for place, result in zip(outs, results, strict=True):
            self.write(place, result)

    def batch(self, calls: Iterable[TorchCall], record: bool = True) -> list[Callable[[], None]]:
        """Return one callable for all calls."""
        return [partial(self.run_all, [call.run for call in calls])]

    def run_all(self, runs: Sequence[Callable[[], None]]) -> None:
        """Issue calls one by one."""
        if self.name == "torch-cpu" and torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)  # bits depend on it
        with device_errors(self.name), torch.no_grad():
            for run in runs:
                run()

    def compile(self, runs: Iterable[Callable[[], None]]) -> None:
        """Do nothing: torch has its kernels compiled."""

    # ---- time --------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until all work is done."""
        if self.name != "torch-cpu":
            with device_errors(self.name):
                self.library.synchronize()

    def mark(self) -> Any:
        """Return the present moment, after all work is done."""
        self.synchronize()
        return time.perf_counter()

    def seconds(self, moment: Any) -> float:
        """Return a moment in seconds."""
        return float(moment)


def run_and_copy(
    found: TorchKernel, outs: Sequence[Torch], ins: Sequence[View], attrs: dict[str, Any]
) -> None:
    """Run a kernel that returns its results, and copy them to their places."""
    results = found.run(*ins, **attrs)
    for place, result in zip(outs, results if isinstance(results, tuple) else (results,), strict=True):
        place.copy_(result)


# ---- CUDA --------------------------------------------------------------------------------------


class CudaDevice(TorchDevice):
    """A CUDA device, which records the calls of a step, and times them by events."""

    def __init__(self, name: str, threads: int) -> None:
        super().__init__(name, threads)
        with device_errors(name):
            torch.cuda.init()
            self.pool = torch.cuda.graph_pool_handle()
            self.first_event = torch.cuda.Event(enable_timing=True)
            self.first_event.record()
            self.first_event.synchronize()
        self.first_time = time.perf_counter()
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            self.precisions = ("f32", "bf16")

    def temporaries(self, node: Node) -> int:
        """Return the bytes that torch allocates while the node runs."""
        return super().temporaries(node) + WORKSPACE_BYTES

    def batch(self, calls: Iterable[TorchCall], record: bool = True) -> list[Callable[[], None]]:
        """Return a recorded callable for each stretch of calls that can be recorded."""
        return [
            RecordedCalls(self, runs) if record and is_recordable else partial(self.run_all, runs)
            for is_recordable, group in groupby(calls, lambda call: call.is_recordable)
            for runs in [[call.run for call in group]]
        ]

    def mark(self) -> torch.cuda.Event:
        """Return an event behind all work that was issued so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, moment: torch.cuda.Event) -> float:
        """Wait for an event and return its time."""
        with device_errors(self.name):
            moment.synchronize()
            return self.first_time + self.first_event.elapsed_time(moment) / 1e3


Choices = frozenset[int]  # the inputs that are zero, of those that kernels chose by


class RecordedCalls:
    """Calls that run one by one at first, are recorded at the second run, and from then on launched together.

    There is a recording for each set of zero inputs that kernels chose by.
    """

    def __init__(self, device: CudaDevice, runs: Sequence[Callable[[], None]]) -> None:
        self.device, self.runs = device, runs
        self.asked = set[int]()
        self.graphs: dict[Choices, torch.cuda.CUDAGraph | None] = {}  # None: run, but not recorded
        self.failed = False

    def __call__(self) -> None:
        """Run all calls."""
        choices = frozenset(self.asked & zero_inputs.addresses)
        if choices in self.graphs and not self.graphs[choices] and not self.failed:
            self.graphs[choices] = self.record()
        if graph := self.graphs.get(choices):
            with device_errors(self.device.name):
                graph.replay()
        else:
            self.run_each()

    def run_each(self) -> None:
        """Issue the calls one by one, and note the inputs that kernels chose by."""
        zero_inputs.asked.clear()
        self.device.run_all(self.runs)
        self.asked |= zero_inputs.asked
        self.graphs.setdefault(frozenset(self.asked & zero_inputs.addresses))

    def record(self) -> torch.cuda.CUDAGraph | None:
        """Record the calls; if torch cannot do so, they run one by one from now on."""
        self.device.synchronize()
        torch.cuda.empty_cache()  # the first run's temporary memory, of which a recording has its own
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                torch.no_grad(),
                torch.cuda.graph(graph, pool=self.device.pool, capture_error_mode="thread_local"),
            ):
                for run in self.runs:
                    run()
        except RuntimeError as error:
            self.failed = True
            log_line(f"the step cannot be recorded, so its calls are issued one by one: {str(error)[:120]}")
            return None
        return graph
