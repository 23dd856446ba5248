"""How fast this machine does what training is made of: small models are trained for a moment, and each op is timed.

An op takes so long for each call, each operation and each byte; that is fitted to what was timed, and kept for a day. Where other
programs are at work, runs in which a thread had to wait for a processor count only if there are no others, and what comes of
them is kept for ten minutes.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from llamatrain.compiler.cache import cache_key, code_cache, find_missing
from llamatrain.compiler.store import ObjectStore, object_name, seal
from llamatrain.compiler.thread_pool import CallTable
from llamatrain.distributed.cores import count_cores
from llamatrain.engine.backend import kernel_class
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
from llamatrain.planner.disturbance import share_of_waiting
from llamatrain.planner.scaling_model import least_squares
from llamatrain.platform.cache_dir import default_cache_dir
from llamatrain.platform.cpu import processor
from llamatrain.train.graphs import StepGraph, StepGraphs, StepSpec

DAY = 86400.0  # seconds that a measurement serves
MINUTES = 600.0  # seconds that one serves which other programs disturbed
MOMENT = 0.12  # seconds that a model is trained again and again
LONG = 1.0  # of a model: then what was timed will do
PATIENCE = 1.0  # seconds of disturbed runs, of all models together: then the machine is taken as busy
RUNS = 3  # at least, that nothing disturbed
QUIET = 0.05  # of a run's time: waiting for a processor for longer than this disturbs it
RANK = 8
SIZES = (  # embd, heads, ff, vocab, row, rows
    (512, 8, 1536, 2048, 128, 1),
    (256, 4, 768, 8192, 32, 2),
    (256, 8, 512, 256, 512, 2),
    (64, 4, 192, 1024, 128, 4),
    (32, 4, 96, 64, 32, 4),
)
BLOCKS = (
    *SIZES[:3],
    (256, 16, 256, 512, 128, 4),
    (256, 4, 256, 64, 32, 2),
)  # of a base whose rows are whole blocks
ANY = ""  # in the place of an op's name: one that moves memory

Cost = Sequence[float]  # seconds of a call, and of each thing that Work counts


class OpTiming(NamedTuple):
    name: str
    kind: str  # with the types that it reads
    work: OpCost
    seconds: float


class ModelTiming(NamedTuple):
    """The ops of a model that was trained for a moment."""

    ops: Sequence[OpTiming]
    disturbed: float = (
        0.0  # share of the time in which threads waited for a processor, where quiet runs were too few
    )
    lost: float = 0.0  # seconds that disturbed runs took


@dataclass(frozen=True)
class OpSpeeds:
    costs: Mapping[str, Cost]
    when: float  # they were measured: seconds since 1970
    disturbed: float = (
        0.0  # share of the time in which threads waited for a processor, where there were no quiet runs
    )

    def of(self, node: Node) -> float:
        if node.op.layout or not any(output.size for output in node.outputs):
            return 0.0
        cost = self.costs.get(typed(node)) or self.costs.get(node.op.name) or self.costs[ANY]
        return sum(each * much for each, much in zip(cost, counted(estimate_cost(node)), strict=False))

    def of_graph(self, graph: StepGraph) -> float:
        """The seconds that all of it takes."""
        return sum(map(self.of, collect_nodes(graph.outputs)))

    def of_bytes(self, moved: int) -> float:
        return self.costs[ANY][2] * moved


def typed(node: Node) -> str:
    return f"{node.op.name} {' '.join(source.dtype.name for source in node.sources[:3])}"


def counted(work: OpCost) -> tuple[int, ...]:
    return 1, work.flops, work.bytes_moved, work.bytes_written, work.exponentials, work.dequantized


def speeds_for(setting: StepSpec, anew: bool = False) -> OpSpeeds | None:
    """The speeds for a model of this kind: those that were measured lately, unless they are to be measured anew, or now.
    None where kernels would have to be compiled, which may not be."""
    base, rule = frozen_type(setting), setting.rule
    how = (
        setting.precision,
        setting.threads,
        kernel_class(setting.kernels),
        setting.flash,
        base.name if base else "",
    )
    facts = repr((processor().name, count_cores(), cache_key(), *how, type(rule).__name__, SIZES, BLOCKS))
    shelf, name = (
        ObjectStore(default_cache_dir("speeds")),
        object_name(f"speeds-{setting.precision}-{setting.threads}", facts),
    )
    if not anew and (kept := shelf.load(name, facts)):
        with suppress(ValueError, TypeError):
            found = OpSpeeds(**json.loads(bytes(kept)))
            if 0 <= time.time() - found.when < (MINUTES if found.disturbed else DAY):
                return found
    made = measured(setting, base)
    if made:
        shelf.save(name, seal(facts, json.dumps(asdict(made)).encode()))
    return made


def frozen_type(setting: StepSpec) -> DType | None:
    """Of most of what is not trained, if anything is not."""
    sizes: dict[DType, int] = {}
    for name, tensor in setting.weights.items():
        if name not in setting.trainable and len(tensor.shape) > 1:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.size
    return max(sizes, key=lambda each: sizes[each], default=None)


# ---- measuring -------------------------------------------------------------


def measured(setting: StepSpec, base: DType | None) -> OpSpeeds | None:
    seen, disturbed, patience = list[OpTiming](), 0.0, PATIENCE
    for size in BLOCKS if base else SIZES:
        found = timed(small(setting, base, size), patience)
        seen += found.ops
        disturbed, patience = max(disturbed, found.disturbed), patience - found.lost
    return OpSpeeds(fitted(seen), time.time(), disturbed) if any(each.work.flops for each in seen) else None


def fitted(seen: Iterable[OpTiming]) -> dict[str, Cost]:
    groups: dict[str, list[OpTiming]] = {}
    for each in seen:
        groups.setdefault(each.name, []).append(each)
        groups.setdefault(each.kind, []).append(each)
        if not each.work.flops:
            groups.setdefault(ANY, []).append(each)
    return {name: cost_of(group) for name, group in groups.items()}


def cost_of(group: Sequence[OpTiming]) -> Cost:
    columns = list(zip(*(counted(each.work) for each in group), strict=True))
    return [float(each) for each in least_squares(columns, [each.seconds for each in group])]


def small(setting: StepSpec, base: DType | None, size: Sequence[int]) -> StepSpec:
    """A model of one layer, which is computed as another one."""
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
    weights = adapted(h, base) if base else trainable_weights(h)
    factors = [
        factor for deltas in weights.deltas.values() for delta in deltas for factor in (delta.a, delta.b)
    ]
    return StepSpec(
        h=h,
        weights=weights,
        trainable={each.name: each for each in (factors if base else weights.tensors.values())},
        batch=batch,
        positions=length,
        precision=setting.precision,
        threads=setting.threads,
        kernels=setting.kernels,
        flash=setting.flash,
        optimizer=setting.rule or AdamW(),
        gradients="flat" if batch > 1 else "arena",
    )


def adapted(h: Hyperparameters, base: DType) -> Weights:
    tensors, deltas = {}, {}
    for name, shape in h.shapes.items():
        tensors[name] = state(name, shape, base if len(shape) > 1 else F32)
        if len(shape) > 1 and name.startswith("blk."):
            a, b = (
                parameter(f"{name}.lora_a", (RANK, shape[1])),
                parameter(f"{name}.lora_b", (shape[0], RANK)),
            )
            deltas[name] = [Delta(a, b, 1.0)]
    return Weights(tensors, deltas)


def timed(setting: StepSpec, patience: float = PATIENCE) -> ModelTiming:
    """Time each op over zeros, which take as long as anything else: its least seconds in runs that nothing disturbed. Where
    disturbed runs have lost more seconds than `patience`, its least seconds in all runs."""
    graphs, length = StepGraphs(setting), setting.positions
    made = [graphs.grad_graph(length, True), graphs.update_graph(length)]
    if setting.gradients == "flat":
        made.insert(1, graphs.grad_graph(length, False))
    weights = zeros_of(made)
    with record(recorder := Recorder()):
        programs = [Program(graphs.plan(graph), held_in(graph, weights), setting.backend) for graph in made]
    if code_cache.lookup_only and any(map(lacks, programs)):
        return ModelTiming([])
    for program in programs:
        program.compile()

    return run_until_quiet(programs, recorder, patience)


def run_until_quiet(programs: Sequence[Program], recorder: Recorder, patience: float) -> ModelTiming:
    """Run a model's programs until enough runs were quiet, or disturbed runs have lost more seconds than `patience`."""

    def run() -> None:
        for program in programs:
            program()

    runs, quiet, shares, lost = list[list[float]](), list[list[float]](), list[float](), 0.0
    start = now = time.perf_counter()
    while len(quiet) < RUNS or now - start < MOMENT:
        before, begun = [op.seconds for op in recorder.ops], now
        shares.append(share_of_waiting(run))
        recorder.end_step(len(runs), 0.0)
        runs.append([op.seconds - gone for op, gone in zip(recorder.ops, before, strict=True)])
        now = time.perf_counter()
        if shares[-1] <= QUIET:
            quiet.append(runs[-1])
        else:
            lost += now - begun
        if now - start > LONG or (lost > patience and now - start > MOMENT):
            break
    enough = len(quiet) >= min(RUNS, len(runs))
    least = np.min(quiet if enough else runs, axis=0)
    seen = [
        OpTiming(op.node.op.name, typed(op.node), op.cost, max(float(seconds), 1e-9))
        for op, seconds in zip(recorder.ops, least, strict=True)
    ]
    return ModelTiming(seen, 0.0 if enough else float(np.mean(shares)), lost)


def lacks(program: Program) -> bool:
    """Whether something that it calls would have to be compiled."""
    tables = (part for stretch in program.segments for part in stretch.batches if isinstance(part, CallTable))
    return bool(find_missing(call.entry for table in tables for call in table.calls))


def zeros_of(graphs: Iterable[StepGraph]) -> dict[Tensor, np.ndarray]:
    """For weights, which are held once, and as their type has it."""
    leaves = {
        each
        for graph in graphs
        for each in collect_leaves(graph.outputs)
        if each.role in ("state", "parameter")
    }
    return {each: np.zeros(each.dtype.storage_shape(each.shape), each.dtype.numpy) for each in leaves}


def held_in(graph: StepGraph, weights: Mapping[Tensor, np.ndarray]) -> dict[Tensor, np.ndarray]:
    return {each: weights[each] for each in collect_leaves(graph.outputs) if each in weights}
