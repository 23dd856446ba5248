"""Measures the speed of this machine: trains small models for a moment and times each op.

The time of an op is fitted as a cost per call, per operation and per byte. The fit is stored for a day. If
other programs are at work, disturbed runs count only if there are no others, and the result is stored for ten
minutes.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llamatrain.compiler.cache import cache_key, code_cache, find_missing
from llamatrain.compiler.store import ObjectStore, object_name, seal
from llamatrain.compiler.thread_pool import CallTable
from llamatrain.distributed.cores import count_cores
from llamatrain.engine.device import Device, Memory, kernel_class
from llamatrain.engine.profiler import Recorder, record
from llamatrain.engine.program import Program
from llamatrain.graph.op_cost import OpCost, estimate_cost
from llamatrain.graph.tensor import F32, DType, Node, Tensor, collect_leaves, collect_nodes, parameter, state
from llamatrain.model.architectures import DEFAULT, find_architecture
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.lora import Delta, Weights
from llamatrain.model.rope import Rope
from llamatrain.model.transformer import trainable_weights
from llamatrain.optim.methods.adamw import AdamW
from llamatrain.platform.cache_dir import default_cache_dir
from llamatrain.platform.cpu import processor
from llamatrain.train.graphs import StepGraph, StepGraphs, StepSpec
from llamatrain.train.int8_copies import make_int8_copies

LIFETIME = 86400.0  # seconds that a measurement is valid
BUSY_LIFETIME = 600.0  # the same if other programs disturbed it
MIN_SECONDS = 0.12  # least seconds to train a model repeatedly
MAX_SECONDS = 1.0  # most seconds for a model
# most seconds of disturbed runs of all models; after that the machine counts as busy
MAX_DISTURBED_SECONDS = 1.0
MIN_RUNS = 3  # least undisturbed runs
QUIET_SHARE = 0.05  # a run is disturbed if threads wait for longer than this share of its time
RANK = 8
SIZES = (  # embd, heads, ff, vocab, row, rows
    (512, 8, 1536, 2048, 128, 1),
    (256, 4, 768, 8192, 32, 2),
    (256, 8, 512, 256, 512, 2),
    (64, 4, 192, 1024, 128, 4),
    (32, 4, 96, 64, 32, 4),
)
# for a base with rows of whole blocks
QUANTIZED_SIZES = (*SIZES[:3], (256, 16, 256, 512, 128, 4), (256, 4, 256, 64, 32, 2))
OTHER_OPS = ""  # the name for all other ops, which move memory

Cost = Sequence[float]  # seconds per unit of each quantity in `cost_terms`


class OpTiming(NamedTuple):
    """The time of one op of a model."""

    name: str
    kind: str  # with the types that it reads
    cost: OpCost
    seconds: float


class ModelTiming(NamedTuple):
    """The times of all ops of a model that was trained for a moment."""

    ops: Sequence[OpTiming]
    # share of the time in which threads waited for a processor, where quiet runs were too few
    wait_share: float = 0.0
    lost_seconds: float = 0.0  # seconds that disturbed runs took


@dataclass(frozen=True)
class OpSpeeds:
    """The fitted costs of ops on this machine."""

    costs: Mapping[str, Cost]
    measured_at: float  # seconds since 1970
    # share of the time in which threads waited for a processor, where there were no quiet runs
    disturbed: float = 0.0

    def node_seconds(self, node: Node) -> float:
        """Return the expected seconds of a node."""
        if node.op.layout or not any(output.size for output in node.outputs):
            return 0.0
        cost = self.costs.get(op_kind(node)) or self.costs.get(node.op.name) or self.costs[OTHER_OPS]
        return sum(
            seconds * amount for seconds, amount in zip(cost, cost_terms(estimate_cost(node)), strict=False)
        )

    def graph_seconds(self, graph: StepGraph, device: Device) -> float:
        """Return the expected seconds of a graph on a device."""
        return sum(map(self.node_seconds, collect_nodes(device.rewrite(graph.outputs))))

    def copy_seconds(self, moved: int) -> float:
        """Return the expected seconds to move bytes."""
        return self.costs[OTHER_OPS][2] * moved


def op_kind(node: Node) -> str:
    """Return the name of a node's op with the types it reads."""
    return f"{node.op.name} {' '.join(source.dtype.name for source in node.sources[:3])}"


def cost_terms(cost: OpCost) -> tuple[int, ...]:
    """Return the quantities that the cost of an op is fitted to."""
    return 1, cost.flops, cost.bytes_moved, cost.bytes_written, cost.exponentials, cost.dequantized


def get_speeds(spec: StepSpec, measure: bool = False) -> OpSpeeds | None:
    """Return the speeds for a model of this kind: stored ones, or, with `measure` or if there are none, measured ones.

    Return None if kernels would have to be compiled and that is not allowed.
    """
    base, rule = frozen_type(spec), spec.rule
    spec_facts = (
        spec.precision,
        spec.int8,
        bool(spec.int8_copies),
        spec.threads,
        kernel_class(spec.kernels),
        spec.flash,
        base.name if base else "",
    )
    facts = repr(
        (
            processor().name,
            count_cores(),
            cache_key(),
            *spec_facts,
            type(rule).__name__,
            SIZES,
            QUANTIZED_SIZES,
        )
    )
    store = ObjectStore(default_cache_dir("speeds"))
    name = object_name(f"speeds-{spec.precision}-{spec.threads}", facts)
    if not measure and (stored := store.load(name, facts)):
        with suppress(ValueError, TypeError):
            speeds = OpSpeeds(**json.loads(bytes(stored)))
            if 0 <= time.time() - speeds.measured_at < (BUSY_LIFETIME if speeds.disturbed else LIFETIME):
                return speeds
    measured = measure_speeds(spec, base)
    if measured:
        store.save(name, seal(facts, json.dumps(asdict(measured)).encode()))
    return measured


def frozen_type(spec: StepSpec) -> DType | None:
    """Return the type of most frozen weights, or None if there are none."""
    sizes: dict[DType, int] = {}
    for name, tensor in spec.read_weights.items():
        if name not in spec.trainable and len(tensor.shape) > 1:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.size
    return max(sizes, key=lambda dtype: sizes[dtype], default=None)


# ---- measuring -------------------------------------------------------------


def measure_speeds(spec: StepSpec, base: DType | None) -> OpSpeeds | None:
    """Time small models of this kind, and fit costs to their ops."""
    timings, worst_wait, disturbed_left = list[OpTiming](), 0.0, MAX_DISTURBED_SECONDS
    for size in QUANTIZED_SIZES if base else SIZES:
        model_timing = time_model(small_spec(spec, base, size), disturbed_left)
        timings += model_timing.ops
        worst_wait = max(worst_wait, model_timing.wait_share)
        disturbed_left = disturbed_left - model_timing.lost_seconds
    return (
        OpSpeeds(fit_costs(timings), time.time(), worst_wait)
        if any(timing.cost.flops for timing in timings)
        else None
    )


def fit_costs(timings: Iterable[OpTiming]) -> dict[str, Cost]:
    """Fit costs per op, per op and type, and for all ops that only move memory."""
    groups: dict[str, list[OpTiming]] = {}
    for timing in timings:
        groups.setdefault(timing.name, []).append(timing)
        groups.setdefault(timing.kind, []).append(timing)
        if not timing.cost.flops:
            groups.setdefault(OTHER_OPS, []).append(timing)
    return {name: fit_cost(group) for name, group in groups.items()}


def fit_cost(group: Sequence[OpTiming]) -> Cost:
    """Fit the cost of an op to its timings."""
    columns = list(zip(*(cost_terms(timing.cost) for timing in group), strict=True))
    return [float(seconds) for seconds in least_squares(columns, [timing.seconds for timing in group])]


def small_spec(spec: StepSpec, base: DType | None, size: Sequence[int]) -> StepSpec:
    """Return a model of one layer that is computed like the given one."""
    embd, heads, ff, vocab, length, batch = size
    h = Hyperparameters(
        vocab=vocab,
        embd=embd,
        layers=1,
        heads=heads,
        kv_heads=heads,
        ff=ff,
        ctx=length,
        head_size=embd // heads,
        rope=Rope(embd // heads),
        architecture=find_architecture(DEFAULT),
    )
    weights = adapter_weights(h, base) if base else trainable_weights(h)
    factors = [
        factor for deltas in weights.deltas.values() for delta in deltas for factor in (delta.a, delta.b)
    ]
    return StepSpec(
        h=h,
        weights=weights,
        trainable={tensor.name: tensor for tensor in (factors if base else weights.tensors.values())},
        batch=batch,
        rope_length=length,
        precision=spec.precision,
        int8=spec.int8,
        int8_copies=make_int8_copies(weights.tensors, h) if spec.int8_copies else {},
        threads=spec.threads,
        kernels=spec.kernels,
        flash=spec.flash,
        optimizer=spec.rule or AdamW(),
        gradients="flat" if batch > 1 else "arena",
    )


def adapter_weights(h: Hyperparameters, base: DType) -> Weights:
    """Return frozen weights with adapters."""
    tensors, deltas = {}, {}
    for name, shape in h.shapes.items():
        tensors[name] = state(name, shape, base if h.is_matrix(name) else F32)
        if h.is_matrix(name) and name.startswith("blk."):
            a = parameter(f"{name}.lora_a", (RANK, shape[1]))
            b = parameter(f"{name}.lora_b", (shape[0], RANK))
            deltas[name] = [Delta(a, b, 1.0)]
    return Weights(tensors, deltas)


def time_model(spec: StepSpec, max_disturbed: float = MAX_DISTURBED_SECONDS) -> ModelTiming:
    """Time each op over zeros: the least seconds of runs that nothing disturbed.

    If disturbed runs have taken more than `max_disturbed` seconds, it is the least of all runs.
    """
    graphs, length = StepGraphs(spec), spec.rope_length
    step_graphs = [graphs.grad_graph(length, True), graphs.update_graph(length)]
    if spec.gradients == "flat":
        step_graphs.insert(1, graphs.grad_graph(length, False))
    weights = make_zeros(step_graphs, spec.device)
    with record(recorder := Recorder()):
        programs = [
            Program(graphs.plan(graph), graph_weights(graph, weights), spec.device) for graph in step_graphs
        ]
    if code_cache.lookup_only and any(map(needs_compiling, programs)):
        return ModelTiming([])
    for program in programs:
        program.compile()

    return run_until_quiet(programs, recorder, max_disturbed)


def run_until_quiet(programs: Sequence[Program], recorder: Recorder, max_disturbed: float) -> ModelTiming:
    """Run programs until enough runs were quiet.

    Stop if disturbed runs have taken more than `max_disturbed` seconds.
    """

    def run() -> None:
        for program in programs:
            program()

    runs, quiet, shares, lost = list[list[float]](), list[list[float]](), list[float](), 0.0
    start = now = time.perf_counter()
    while len(quiet) < MIN_RUNS or now - start < MIN_SECONDS:
        before, run_start = [op.seconds for op in recorder.ops], now
        shares.append(wait_share(run))
        recorder.end_step(len(runs), 0.0)
        runs.append([op.seconds - earlier for op, earlier in zip(recorder.ops, before, strict=True)])
        now = time.perf_counter()
        if shares[-1] <= QUIET_SHARE:
            quiet.append(runs[-1])
        else:
            lost += now - run_start
        if now - start > MAX_SECONDS or (lost > max_disturbed and now - start > MIN_SECONDS):
            break
    enough = len(quiet) >= min(MIN_RUNS, len(runs))
    least = np.min(quiet if enough else runs, axis=0)
    timings = [
        OpTiming(op.node.op.name, op_kind(op.node), op.cost, max(float(seconds), 1e-9))
        for op, seconds in zip(recorder.ops, least, strict=True)
    ]
    return ModelTiming(timings, 0.0 if enough else float(np.mean(shares)), lost)


def needs_compiling(program: Program) -> bool:
    """Return True if a program calls a kernel that is not compiled."""
    tables = (part for segment in program.segments for part in segment.batches if isinstance(part, CallTable))
    return bool(find_missing(call.entry for table in tables for call in table.calls))


def make_zeros(graphs: Iterable[StepGraph], device: Device) -> dict[Tensor, Memory]:
    """Return a device's memory with zeros for all weights of some graphs."""
    leaves = {
        leaf
        for graph in graphs
        for leaf in collect_leaves(graph.outputs)
        if leaf.role in ("state", "parameter")
    }
    return {leaf: device.allocate(leaf.nbytes) for leaf in leaves}


def graph_weights(graph: StepGraph, weights: Mapping[Tensor, Memory]) -> dict[Tensor, Memory]:
    """Return the memory of the weights in a graph."""
    return {leaf: weights[leaf] for leaf in collect_leaves(graph.outputs) if leaf in weights}


def least_squares(columns: Sequence[Sequence[float]], values: Sequence[float]) -> np.ndarray:
    """Return the non-negative unknowns with the least relative errors.

    There are few unknowns: every subset that is not 0 is tried, and of two equally good ones the smaller is
    taken.
    """
    rows = np.array(columns, np.float64).T / np.array(values, np.float64)[:, None]
    scales = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    best, least = np.zeros(rows.shape[1]), np.inf
    for count in range(1, rows.shape[1] + 1):
        for chosen in map(list, combinations(range(rows.shape[1]), count)):
            part = rows[:, chosen] / scales[chosen]
            solution = np.linalg.lstsq(part, np.ones(len(rows)), rcond=None)[0]
            off = float(np.sum((part @ solution - 1) ** 2))
            if (solution >= 0).all() and off < least * (1 - 1e-9) - 1e-24:
                best, least = np.zeros(rows.shape[1]), off
                best[chosen] = solution / scales[chosen]
    return best


# ---- disturbance by other programs -----------------------------------------

TASKS = Path("/proc/self/task")


def total_wait() -> float:
    """Return the seconds that threads of this process were ready but did not run; only differences mean anything.

    Linux counts them per thread. Elsewhere it is the time that this thread did not run, which is right if it
    never sleeps.
    """
    total, known = 0, False
    with suppress(OSError):
        for task in TASKS.iterdir():
            with suppress(OSError, ValueError, IndexError):  # a thread may end meanwhile
                total += int((task / "schedstat").read_text().split()[1])
                known = True
    return total * 1e-9 if known else time.perf_counter() - time.thread_time()


def wait_share(work: Callable[[], None]) -> float:
    """Do some work; return the share of its time in which a thread waited."""
    before, start = total_wait(), time.perf_counter()
    work()
    took = time.perf_counter() - start
    return min(1.0, max(0.0, total_wait() - before) / max(took, 1e-9))
