"""Plans how much memory a run takes."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from llamatrain.config.units import Size
from llamatrain.engine.plan import Plan
from llamatrain.gguf.rewrite import PANEL
from llamatrain.graph.dynamic_axis import node_dynamic_dim
from llamatrain.graph.remat_policy import Policy
from llamatrain.graph.tensor import QuantizedType
from llamatrain.sample.batch import BatchDecoder
from llamatrain.sample.decoder import Decoder
from llamatrain.train.graphs import StepGraphs, StepSpec
from llamatrain.train.parallel.accumulate import plan_accumulation
from llamatrain.train.parallel.partition import BUCKET, ParamSlice, rank_range
from llamatrain.train.prefetch import prefetch_count

TOKEN_BYTES = 20  # bytes of a token in a batch: five arrays
# bytes that a process grows by besides what is planned: kernels, threads, late imports
PROCESS_GROWTH = 6_400_000
# further bytes if samples are generated: programs that decode, and their imports
SAMPLING_GROWTH = 3 * 10**6
# most bytes for initializing, checking and saving the weights, which takes six times the largest of them
INIT_GROWTH = 6_200_000
NODE_BYTES = 3500  # bytes of a node that is bound to memory and a kernel
UPDATE_NODE_BYTES = 2500  # bytes of each node of an update beyond two per weight
RESIZED_NODE_BYTES = 1500  # bytes of a node bound again for another length
RESIZED_LENGTHS = 4  # how many of the 16 possible lengths a run usually meets
NODES_PER_LAYER = 40  # least nodes of a layer: its block and their gradients
MAX_SAMPLED_RANKS = 64  # most ranks whose memory is computed
MERGE_FLOATS = 2  # floats to merge an adapter into one weight of a panel, and to round it
ROUNDING_FLOATS = 4  # floats to round one float of a bucket
MIN_SPLIT_TOKENS = 256  # smaller batches are not split: their products would be slower


@dataclass(frozen=True, kw_only=True)
class MemoryBreakdown:
    """Bytes of a run, by what they are for."""

    weights: int
    gradients: int
    exchange: int  # sums that wait for other ranks, and buffers to receive
    moments: int
    packed_copies: int
    rounded_weights: int  # in quantization-aware training
    base_pages: int
    inputs: int
    arena: int
    decoding: int
    temporaries: int  # what a device's kernels allocate while they run
    staging: int  # copies in the host's memory of vectors that a device holds
    interpreter: int

    @property
    def total(self) -> int:
        """The total in bytes."""
        return sum(asdict(self).values())

    @property
    def on_host(self) -> int:
        """The bytes that a run with a device of its own memory takes of the host's."""
        return self.exchange + self.staging + self.interpreter

    def describe(self) -> str:
        """Return the total and its parts in words."""
        kinds = [f"{name} {Size(size).text}" for name, size in asdict(self).items() if size]
        return f"{Size(self.total).text}: {', '.join(kinds)}"


@dataclass(frozen=True, kw_only=True)
class MemoryDemand:
    """Facts about a run, besides its step, that decide how much memory it takes."""

    lengths: Sequence[int]
    has_validation: bool
    decoder_positions: int  # positions of the cache for samples; 0: none
    decoder_slots: int = 1  # samples that are generated together
    answer_positions: int = 0  # of each row's cache for answers that are generated; 0: none
    resident: int  # what the process takes already
    batches: int = 1  # per step
    copy_bytes: int = 0  # copies of the base's matrices
    # float32 weights of the base that are in memory at once, read from the mapped file; on a device, all of it
    page_bytes: int = 0
    own_memory: bool = False  # the device has memory of its own, for which the limit is


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """A way to run a step, with its graphs and its memory."""

    spec: StepSpec
    policy: Policy
    splits: int  # micro-batches per batch
    graphs: StepGraphs
    arena: int  # bytes of the arena that programs share
    breakdown: MemoryBreakdown
    own_memory: bool = False  # the device has memory of its own

    @property
    def total(self) -> int:
        """The bytes of the memory that is limited: the device's own, or the host's."""
        return self.breakdown.total - (self.breakdown.on_host if self.own_memory else 0)

    def describe(self) -> str:
        """Return the memory and its parts in words."""
        text = self.breakdown.describe()
        if not self.own_memory:
            return text
        own, host = Size(self.total).text, Size(self.breakdown.on_host).text
        return f"{own} on the device and {host} on the host: {text.partition(': ')[2]}"


def fixed_bytes(spec: StepSpec, demand: MemoryDemand) -> int:
    """Return what every plan takes: weights, stored gradients, moments, and a graph of all layers."""
    sizes = {name: 4 * tensor.size for name, tensor in spec.trainable.items()}
    trained = sum(sizes.values())
    # only rows of an embedding may have gradients
    roles = {"table"} if spec.h.tied else {"embedding", "table"}
    embedding_bytes = sum(sizes.get(name, 0) for name, kind in spec.h.weight_kinds() if kind.role in roles)
    gradients = {"flat": trained, "arena": trained - embedding_bytes, "streamed": 0}[spec.gradients]
    return (
        moment_bytes(spec) // spec.ranks
        + trained
        + gradients
        + demand.copy_bytes
        + spec.rounded_bytes
        + NODES_PER_LAYER * NODE_BYTES * spec.h.layers
    )


def batch_bytes(spec: StepSpec, demand: MemoryDemand) -> int:
    """Return the bytes of a step's batches, which are the same in every plan."""
    return TOKEN_BYTES * spec.batch * max(demand.lengths) * (demand.batches + prefetch_count(demand.batches))


def moment_bytes(spec: StepSpec) -> int:
    """Return the bytes of the optimizer's states."""
    return 4 * spec.optimizer.count_floats(spec.shapes) if spec.optimizer else 0


def comm_bytes(graphs: StepGraphs, batches: int) -> int:
    """Return the bytes for sums that wait for other ranks, and for what they send."""
    spec, partition = graphs.spec, graphs.partition
    vectors = max(
        plan_accumulation(rank_range(spec.groups, spec.ranks, rank), spec.groups, batches).vector_count
        for rank in sample_ranks(spec)
    )
    size = sum(tensor.size for tensor in spec.trainable.values())
    receive_floats = max(partition.receive_size(rank) for rank in sample_ranks(spec))
    bf16_floats = (
        (receive_floats + ROUNDING_FLOATS * min(BUCKET, size)) if spec.comm_bf16 and spec.ranks > 1 else 0
    )
    return 4 * (size * (vectors - 1) + receive_floats) + 4 * bf16_floats


def state_bytes(graphs: StepGraphs) -> int:
    """Return the bytes of the optimizer's states on the rank that holds most."""
    spec, rule = graphs.spec, graphs.spec.rule
    if not rule or spec.groups == 1:
        return moment_bytes(spec)

    def slice_bytes(cut: ParamSlice) -> int:
        return (
            4
            * (cut.stop - cut.start)
            * sum(rule.has_state(kind, cut.name, cut.shape) for kind in rule.states)
        )

    return max(sum(map(slice_bytes, graphs.partition.rank_slices(rank))) for rank in sample_ranks(spec))


def sample_ranks(spec: StepSpec) -> range:
    """Return the ranks whose memory is computed; the same on every rank, so that all make the same plan."""
    return range(0, spec.ranks, -(-spec.ranks // MAX_SAMPLED_RANKS))


def file_bytes(spec: StepSpec, plan: Plan) -> int:
    """Return the bytes of quantized weights that are resident while a graph reads them from their file."""
    own = {weight.stored for weight in spec.rounded.values()}
    quantized = (leaf for leaf in plan.leaves("state") if isinstance(leaf.dtype, QuantizedType))
    return spec.device.resident_bytes(leaf.nbytes for leaf in quantized if leaf not in own)


def process_growth(spec: StepSpec, decoding: bool) -> int:
    """Return the bytes that the process will grow by besides its programs and their data."""
    largest = max((4 * tensor.size for tensor in spec.trainable.values()), default=0)
    growth = PROCESS_GROWTH + min(INIT_GROWTH, 6 * largest) + (SAMPLING_GROWTH if decoding else 0)
    if spec.rounded and spec.reference:
        merged = max(weight.stored.size for weight in spec.rounded.values())
        growth += 4 * MERGE_FLOATS * min(PANEL, merged)
    return growth


def decoder_bytes(spec: StepSpec, positions: int, slots: int) -> int:
    """Return the bytes of a decoder of some texts at a time, each with a cache of this many positions."""
    rest = spec.threads, spec.kernels, spec.read_weights, spec.drop_base
    if slots == 1:
        return Decoder.plan(spec.h, positions, *rest).total
    return BatchDecoder.plan(spec.h, positions, slots, *rest).total


def answer_decoder_bytes(spec: StepSpec, positions: int) -> int:
    """Return the bytes of a decoder that generates an answer in each row, with a cache of this many positions."""
    rest = spec.threads, spec.kernels, spec.read_weights, spec.drop_base
    return BatchDecoder.plan(spec.h, positions, spec.batch, *rest).total


def split_batch(spec: StepSpec, splits: int) -> StepSpec:
    """Return the spec of a micro-batch, if a batch is split into this many."""
    gradients = "flat" if splits > 1 else spec.gradients
    return replace(spec, batch=spec.batch // splits, gradients=gradients)


def plan_memory(spec: StepSpec, policy: Policy, demand: MemoryDemand, splits: int = 1) -> MemoryPlan:
    """Build the graphs of a step and compute the memory of the run."""
    batch_size_bytes, spec = batch_bytes(spec, demand), split_batch(spec, splits)
    graphs, gradients = StepGraphs(spec, policy), spec.gradients
    shared, own = graphs.build_all(demand.lengths, gradients == "flat", demand.has_validation)
    plans, updates = ([graphs.plan(graph) for graph in graph_list] for graph_list in (shared, own))
    size = 4 * sum(tensor.size for tensor in spec.trainable.values())
    inputs = (
        batch_size_bytes
        + sum(plan.role_bytes("input") for plan in plans)
        + graphs.table.nbytes
        + sum(a.nbytes for a in graphs.states.values())
    )
    decoding = (
        decoder_bytes(spec, demand.decoder_positions, demand.decoder_slots) if demand.decoder_positions else 0
    )
    decoding += answer_decoder_bytes(spec, demand.answer_positions) if demand.answer_positions else 0
    arena = max(plan.arena for plan in plans)
    pages = max(demand.page_bytes, *(file_bytes(spec, plan) for plan in plans))
    kept_gradients = max(sum(gradient.nbytes for gradient in graph.memory_names) for graph in shared)
    arena_bytes = (
        arena + sum(plan.arena for plan in updates) - (kept_gradients if gradients == "arena" else 0)
    )
    node_count = sum(len(plan.nodes) for plan in plans)
    update_nodes = sum(len(plan.nodes) for plan in updates)
    plain_update_nodes = min(update_nodes, 2 * len(spec.trainable) * len(updates))
    resized_nodes = sum(node_dynamic_dim(node) is not None for plan in plans for node in plan.nodes)
    program_bytes = (
        NODE_BYTES * (node_count + plain_update_nodes)
        + RESIZED_NODE_BYTES * RESIZED_LENGTHS * resized_nodes
        + UPDATE_NODE_BYTES * (update_nodes - plain_update_nodes)
    )
    device, all_plans = spec.device, (*plans, *updates)
    breakdown = MemoryBreakdown(
        weights=size,
        gradients=kept_gradients,
        exchange=comm_bytes(graphs, demand.batches * splits) if spec.groups > 1 else 0,
        moments=state_bytes(graphs),
        packed_copies=demand.copy_bytes,
        rounded_weights=spec.rounded_bytes,
        base_pages=pages,
        inputs=inputs,
        arena=arena_bytes,
        decoding=decoding,
        temporaries=max(device.temporaries(node) for plan in all_plans for node in plan.nodes),
        staging=0 if device.is_host else size + kept_gradients + state_bytes(graphs),
        interpreter=demand.resident + program_bytes,
    )
    return MemoryPlan(
        spec=spec,
        policy=policy,
        splits=splits,
        graphs=graphs,
        arena=arena,
        breakdown=breakdown,
        own_memory=demand.own_memory,
    )


def host_error(plan: MemoryPlan, limit: int | None) -> str | None:
    """Return the message for a run on a device that takes more than the host's memory, or None if it fits."""
    size = plan.breakdown.on_host
    if not plan.own_memory or limit is None or size <= limit:
        return None
    return (
        f"the run needs {Size(size).text} of the host's memory besides the device's (copies for checkpoints: "
        f"{Size(plan.breakdown.staging).text}), but only {Size(limit).text} are free; use a smaller model"
    )


def memory_error(plan: MemoryPlan, option: int | None, limit: int | None) -> str | None:
    """Return the message for a plan that exceeds the memory, or None if it fits."""
    if limit is None or plan.total <= limit:
        return None
    limit_text = (
        f"--memory is {Size(limit).text}" if option is not None else f"only {Size(limit).text} are free"
    )
    need_text = f"{Size(plan.total).text} ({plan.breakdown.describe().partition(': ')[2]})"
    return f"the run needs {need_text}, but {limit_text}; use {', '.join(list_savings(plan))}"


def list_savings(plan: MemoryPlan) -> Iterator[str]:
    """Yield what can be changed so that a run takes less memory."""
    spec = plan.spec
    if plan.breakdown.packed_copies and (spec.int8_copies or not spec.drop_base):
        yield "--cache-base off"
    if spec.precision == "f32" and spec.optimizer and not spec.optimizer.needs_f32:
        yield "--precision bf16"
    yield "a smaller --batch, --ctx or model"
