"""What a run will take, before it takes it; and what is computed again, or split, so that it fits."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from llamatrain.config.units import Size
from llamatrain.graph.dynamic_axis import node_dynamic_dim
from llamatrain.sample.decoder import Decoder
from llamatrain.train.graphs import Policy, StepGraphs, StepSpec
from llamatrain.train.parallel.accumulate import plan_accumulation
from llamatrain.train.parallel.partition import BUCKET, ParamSlice, rank_range
from llamatrain.train.prefetch import prefetch_count

ROW = 20  # bytes of a token in a batch: five arrays
LOADED = 6_400_000  # bytes that a process grows by beside what is planned: kernels, what threads have, what is imported late
SAMPLING = 3 * 10**6  # bytes besides where samples are made: programs that decode, and what they import
FILLING = 6_200_000  # bytes that filling, checking and saving its weights adds to that at most: six times the largest of them
BOUND = 3500  # bytes of a node that is bound to memory and a kernel: arrays, and the words of its calls
STEPPED = 2500  # likewise of one more than two for each weight that is stepped: no gradient was made of it
VARIED = 1500  # likewise of one that is bound in another length: its graph and its plan are there already
LENGTHS = 4  # in which what varies is bound besides, of the sixteen that there are: batches are much alike
NODES = 40  # that a layer has at least: its block, and the gradients of it
TOLD = 64  # ranks
HALVING = 4  # floats for each of a bucket that is rounded
SMALL = 256  # tokens: a batch of fewer is split no further, its products would run below their speed


@dataclass(frozen=True, kw_only=True)
class MemoryBreakdown:
    """Bytes, by what they are for."""

    weights: int
    gradients: int
    exchange: int  # sums that wait for others, and what comes from other ranks
    moments: int
    packed_copies: int
    base_pages: int
    inputs: int
    arena: int
    decoding: int
    interpreter: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def describe(self) -> str:
        kinds = [f"{name} {Size(size).text}" for name, size in asdict(self).items() if size]
        return f"{Size(self.total).text}: {', '.join(kinds)}"


@dataclass(frozen=True, kw_only=True)
class MemoryDemand:
    """What of a run decides its memory, beside the setting."""

    lengths: Sequence[int]
    validating: bool
    decoding: int  # positions of the cache for samples; 0: none
    interpreter: int  # what the process holds already
    batches: int = 1  # of a step, which are read before it, as more are while it runs
    copies: int = 0  # of the base
    pages: int = 0  # of its float32 weights, read where they lie, that are in memory at once


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """A way to run: with its graphs, so that they are built once."""

    setting: StepSpec
    policy: Policy
    splits: int  # a batch is run in so many parts
    graphs: StepGraphs
    arena: int  # that programs share
    needs: MemoryBreakdown

    @property
    def total(self) -> int:
        return self.needs.total


def fixed(setting: StepSpec, demand: MemoryDemand) -> int:
    """What no way to run it can change: weights, gradients that stay, moments, and a graph of all layers."""
    size = {name: 4 * tensor.size for name, tensor in setting.trainable.items()}
    trained = sum(size.values())
    rows = (
        0 if setting.h.tied else size.get(setting.h.architecture.weight_with_role("embedding"), 0)
    )  # few of them may have a gradient
    gradients = {"flat": trained, "arena": trained - rows, "streamed": 0}[setting.gradients]
    return (
        moments_of(setting) // setting.ranks
        + trained
        + gradients
        + demand.copies
        + NODES * BOUND * setting.h.layers
    )


def batches_of(setting: StepSpec, demand: MemoryDemand) -> int:
    """Bytes of a step's batches, which no way to run it can change."""
    return ROW * setting.batch * max(demand.lengths) * (demand.batches + prefetch_count(demand.batches))


def moments_of(setting: StepSpec) -> int:
    return 4 * setting.optimizer.floats(setting.shapes) if setting.optimizer else 0


def exchange_of(graphs: StepGraphs, batches: int) -> int:
    """Of a step with so many micro-batches."""
    setting, division = graphs.spec, graphs.partition
    vectors = max(
        plan_accumulation(
            rank_range(setting.groups, setting.ranks, rank), setting.groups, batches
        ).vector_count
        for rank in some(setting)
    )
    size, room = (
        sum(tensor.size for tensor in setting.trainable.values()),
        max(division.receive_size(rank) for rank in some(setting)),
    )
    halves = (room + HALVING * min(BUCKET, size)) if setting.comm_bf16 and setting.ranks > 1 else 0
    return 4 * (size * (vectors - 1) + room) + 4 * halves


def held_of(graphs: StepGraphs) -> int:
    """Bytes of the optimizer's states, on the rank that holds most."""
    setting, rule = graphs.spec, graphs.spec.rule
    if not rule or setting.groups == 1:
        return moments_of(setting)

    def held(cut: ParamSlice) -> int:
        return 4 * (cut.stop - cut.start) * sum(rule.holds(kind, cut.name, cut.shape) for kind in rule.states)

    return max(sum(map(held, graphs.partition.rank_slices(rank))) for rank in some(setting))


def some(setting: StepSpec) -> range:
    """Ranks that tell of all, the same ones whoever asks: what is planned must not depend on who plans it."""
    return range(0, setting.ranks, -(-setting.ranks // TOLD))


def growth_of(setting: StepSpec, decoding: bool) -> int:
    """Return the bytes that a process grows by beside its programs and what they run over."""
    largest = max((4 * tensor.size for tensor in setting.trainable.values()), default=0)
    return LOADED + min(FILLING, 6 * largest) + (SAMPLING if decoding else 0)


def decoding_of(setting: StepSpec, positions: int) -> int:
    return Decoder.plan(setting.h, positions, setting.threads, setting.kernels, setting.weights).total


def parted(setting: StepSpec, splits: int) -> StepSpec:
    """For a batch in so many parts."""
    gradients = "flat" if splits > 1 else setting.gradients
    return replace(setting, batch=setting.batch // splits, gradients=gradients)


def way_with(setting: StepSpec, policy: Policy, demand: MemoryDemand, splits: int = 1) -> MemoryPlan:
    batches, setting = batches_of(setting, demand), parted(setting, splits)
    graphs, gradients = StepGraphs(setting, policy), setting.gradients
    shared, own = graphs.build_all(demand.lengths, gradients == "flat", demand.validating)
    plans, updates = ([graphs.plan(graph) for graph in each] for each in (shared, own))
    size = 4 * sum(tensor.size for tensor in setting.trainable.values())
    inputs = (
        batches
        + sum(plan.role_bytes("input") for plan in plans)
        + graphs.table.nbytes
        + sum(a.nbytes for a in graphs.states.values())
    )
    decoding = decoding_of(setting, demand.decoding) if demand.decoding else 0
    arena, pages = max(plan.arena for plan in plans), max(demand.pages, *(plan.base_bytes for plan in plans))
    kept = max(
        sum(gradient.nbytes for gradient in graph.memory_names) for graph in shared
    )  # of an embedding, rows alone
    beside = arena + sum(plan.arena for plan in updates) - (kept if gradients == "arena" else 0)
    nodes, stepping = sum(len(plan.nodes) for plan in plans), sum(len(plan.nodes) for plan in updates)
    few = min(stepping, 2 * len(setting.trainable) * len(updates))
    varying = sum(node_dynamic_dim(node) is not None for plan in plans for node in plan.nodes)
    bound = BOUND * (nodes + few) + VARIED * LENGTHS * varying + STEPPED * (stepping - few)
    needs = MemoryBreakdown(
        weights=size,
        gradients=kept,
        exchange=exchange_of(graphs, demand.batches * splits) if setting.groups > 1 else 0,
        moments=held_of(graphs),
        packed_copies=demand.copies,
        base_pages=pages,
        inputs=inputs,
        arena=beside,
        decoding=decoding,
        interpreter=demand.interpreter + bound,
    )
    return MemoryPlan(setting=setting, policy=policy, splits=splits, graphs=graphs, arena=arena, needs=needs)


def excess(way: MemoryPlan, limit: int | None, most: int | None) -> str | None:
    """What to say of a run that takes more than was allowed, or is free."""
    if most is None or way.total <= most:
        return None
    told = f"--memory allows {Size(most).text}" if limit is not None else f"{Size(most).text} are free for it"
    takes = f"{Size(way.total).text} ({way.needs.describe().partition(': ')[2]})"
    copied = way.needs.packed_copies and not way.setting.drop_base
    less = "--cache-base off, a smaller --batch or --ctx" if copied else "a smaller --batch, --ctx or model"
    return f"the run takes {takes}, and {told}; {less} takes less"
