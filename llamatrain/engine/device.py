"""The interface between the engine and a device: memory and kernels.

`kernels/reference`, `kernels/cpu` and `kernels/torch` implement it. It does not assume that Python can see the
memory: only `read` and `write` copy to and from it. What `batch` returns may be recorded once and launched many
times, and it may return before the device has done the work.
"""

from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np

from llamatrain.compiler.cache import code_cache
from llamatrain.errors import DeviceError, GraphError
from llamatrain.graph.precision import Precision
from llamatrain.graph.tensor import Node, QuantizedType, Tensor
from llamatrain.kernels.torch import GPUS
from llamatrain.platform.cpu import enabled_units, processor

DEVICES = ("cpu", "reference", *GPUS, "torch-cpu")
TORCH_HINT = "pip install 'llamatrain[torch]' installs it"
# Types of a device, opaque to the engine: memory, the view of a tensor, a call, a moment of its work.
Memory = Any
View = Any
Call = Any
Moment = Any


class Device(Protocol):
    """Memory and kernels for programs."""

    name: str
    reads_ahead: bool  # pages of mapped weights are requested before they are needed
    is_host: bool  # arrays are used in place, and a view that is read is the memory itself
    precisions: Sequence[Precision]  # of products; the first is the default
    has_int8_products: bool  # products with frozen weights may be in 8-bit integers

    @property
    def kernel_class(self) -> str:
        """The name of all devices that give the same bits."""

    # ---- memory ------------------------------------------------------------

    def memory_limit(self) -> int | None:
        """Return the bytes that a run may take of the device's own memory; None if it has only the host's."""

    def peak_bytes(self) -> int | None:
        """Return the most bytes of its own memory that this process has used; None if it has only the host's."""

    def allocate(self, size: int, within: Memory | None = None, start: int = 0) -> Memory:
        """Return `size` zeroed, aligned bytes, or a part of `within`.

        Raise GraphError if that is too small.
        """

    def upload(self, array: np.ndarray) -> Memory:
        """Return memory with the contents of an array; on a host it is the array itself."""

    def use_memory(self, tensor: Tensor, memory: Memory | View, changed: bool) -> Memory:
        """Return memory for a tensor: an array, allocated memory, or another program's view.

        Raise GraphError if it does not fit, or if it is to be `changed` and cannot be.
        """

    def view(self, memory: Memory, tensor: Tensor, offset: int, strides: Sequence[int]) -> View:
        """Return the view of a tensor at an offset, in bytes. It is made once, when a program is bound."""

    def resident_bytes(self, sizes: Iterable[int]) -> int:
        """Return how many bytes of mapped, read-only weights of these sizes are resident at once."""

    def read_ahead_calls(self, weight: View, ends: View | None) -> list[Call]:
        """Return calls that request the pages of a mapped weight; `ends` says which experts have choices."""

    def read(self, place: View) -> np.ndarray:
        """Return the contents as a read-only array, valid until the next run."""

    def write(self, place: View, values: Any, at: Any = ...) -> None:
        """Write values to a view or a part of it; a number fills it."""

    def is_finite(self, place: View, masks: bool = False) -> bool:
        """Return True if no element is NaN or infinite; with `masks`, minus infinity is allowed."""

    # ---- kernels -----------------------------------------------------------

    def can_decode(self, dtype: QuantizedType) -> bool:
        """Return True if products read weights of this type in their file's format."""

    def rewrite(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the outputs of an equal graph that suits the device's kernels better."""

    def has_kernel(self, node: Node) -> bool:
        """Return True if the device has a kernel for this node; otherwise the reference kernel runs."""

    def scratch(self, node: Node) -> int:
        """Return the bytes of the arena that the node's kernel needs besides its outputs."""

    def temporaries(self, node: Node) -> int:
        """Return the bytes outside the arena that the node's kernel allocates while it runs."""

    def bind(self, node: Node, outs: Sequence[View], ins: Sequence[View], scratch: Memory) -> list[Call]:
        """Return the calls that compute a node into `outs`."""

    def batch(self, calls: Iterable[Call], record: bool = True) -> list[Callable[[], None]]:
        """Combine the calls of many nodes, in order, into few callables.

        Without `record`, each run issues the calls one by one.
        """

    def compile(self, runs: Iterable[Callable[[], None]]) -> None:
        """Compile or load everything that these callables need."""

    # ---- time --------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until all work is done."""

    def mark(self) -> Moment:
        """Return the moment at which all work that was issued so far will be done."""

    def seconds(self, moment: Moment) -> float:
        """Wait for a moment, and return it in seconds of `time.perf_counter`."""


def is_compiled(device: str) -> bool:
    """Return True if this device has compiled kernels on this machine."""
    check_name(device)
    return device == "cpu" and code_cache.is_available()


def check_name(device: str) -> None:
    """Raise GraphError unless this is the name of a device."""
    if device not in FACTORIES:
        raise GraphError(
            f"kernels must be {', '.join(DEVICES[:-1])} or {DEVICES[-1]} (got {device!r})",
            code="unknown-kernels",
        )


def kernel_class(device: str) -> str:
    """Return a name for kernels that give the same bits, such as the processor class they are compiled for."""
    if device in ("cpu", "reference"):
        return processor().name if is_compiled(device) else "numpy"
    return create_device(device).kernel_class


def default_precision(device: str) -> Precision:
    """Return the faster precision of a device."""
    if device in ("cpu", "reference"):
        return "bf16" if enabled_units() & {"amx", "avx512bf16"} and is_compiled(device) else "f32"
    return create_device(device).precisions[0]


def find_gpu() -> str | None:
    """Return the device name of a graphics processor that torch can use, or None."""
    if find_spec("torch") is None:
        return None
    from llamatrain.kernels.torch.device import available_gpus

    return next(iter(available_gpus()), None)


def resolve_device(name: str) -> str:
    """Return the name of a device: for "auto", a graphics processor if there is one."""
    return (find_gpu() or "cpu") if name == "auto" else name


def create_device(
    name: str = "cpu", threads: int = 1, drops: bool = False, reads_ahead: bool = False
) -> Device:
    """Create a device.

    With `drops`, pages of mapped files are released after each read; with `reads_ahead`, they are requested before.
    """
    if threads < 1:
        raise GraphError(f"threads must be at least 1 (got {threads})", code="invalid-threads")
    check_name(name)
    return FACTORIES[name](name, threads, drops, reads_ahead)


def create_reference(name: str, threads: int, drops: bool, reads_ahead: bool) -> Device:
    """Create the device of numpy kernels."""
    from llamatrain.kernels.reference.device import ReferenceDevice

    return ReferenceDevice(threads, drops, reads_ahead)


def create_cpu(name: str, threads: int, drops: bool, reads_ahead: bool) -> Device:
    """Create the device of compiled kernels, or that of numpy kernels if there are none for this machine."""
    if not is_compiled(name):
        return create_reference(name, threads, drops, reads_ahead)
    from llamatrain.kernels.cpu.device import CpuDevice

    return CpuDevice(threads, drops, reads_ahead)


def create_torch(name: str, threads: int, drops: bool, reads_ahead: bool) -> Device:
    """Create a device of PyTorch."""
    if find_spec("torch") is None:
        raise DeviceError(f"--device {name} needs PyTorch; {TORCH_HINT}", code="no-torch")
    from llamatrain.kernels.torch.device import open_device

    return open_device(name, threads)


FACTORIES: dict[str, Callable[[str, int, bool, bool], Device]] = {
    "cpu": create_cpu,
    "reference": create_reference,
    **dict.fromkeys((*GPUS, "torch-cpu"), create_torch),
}
