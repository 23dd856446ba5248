"""Forecasts memory traffic and step time of a run on several machines like this one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from llamatrain.config.options import COUNT
from llamatrain.graph.remat_policy import POLICY_NAMES, Policy
from llamatrain.planner.layers import layers_are_alike, with_layers
from llamatrain.planner.memory import MemoryPlan
from llamatrain.planner.scaling_model import FLOAT, LinkModel, ShardedStep, StepTimeBreakdown, step_seconds
from llamatrain.planner.speeds import OpSpeeds, get_speeds
from llamatrain.run.config import RunConfig
from llamatrain.run.options import TrainOptions
from llamatrain.run.resolve import choose_gradients, split_for_ranks
from llamatrain.train.graphs import StepGraphs, StepSpec

MAX_RANKS = 4096  # most ranks in a forecast
MESSAGE_SECONDS = 20e-6  # seconds per message, over Ethernet
SPREAD = 0.02  # spread of step times between ranks, as a share
MIN_SPEEDUP = 1.25  # least speed-up by which doubling the ranks counts as useful


@dataclass(frozen=True, kw_only=True)
class RankForecast:
    """A step on a number of ranks.

    It is the same step (strong scaling), or one that grows with the ranks (weak scaling).
    """

    ranks: int
    rows: int
    seconds: StepTimeBreakdown
    efficiency: float  # rows per second and rank, relative to one rank alone
    weak_efficiency: float  # the same for a step that grows with the ranks

    @property
    def rows_per_second(self) -> float:
        """Rows per second of all ranks."""
        return self.rows / self.seconds.total


@dataclass(frozen=True, kw_only=True)
class ScalingForecast:
    """The forecast for several numbers of ranks."""

    step: ShardedStep  # with the number of ranks that was asked for
    rows: Sequence[RankForecast]
    useful_ranks: int  # ranks up to which doubling them is useful, for the same step
    next_speedup: float  # speed-up of the next doubling; 0: the step has no rows for it
    speeds: OpSpeeds

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends in a step; it receives as many."""
        return round(self.step.sent_gradients + self.step.sent_weights)


# ---- the shape of a step ---------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The shape of a step on one rank, from which shapes on several ranks follow."""

    config: RunConfig
    trained: int
    grad_bytes: int
    max_rows: int  # most rows of a micro-batch that fit the memory

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return self.config.train.batch * self.config.train.grad_acc

    def strong_scaled(self, ranks: int) -> tuple[ShardedStep, int]:
        """Return the same step on several ranks and the rows of its micro-batches.

        Each rank has at least one row.
        """
        train = self.config.train
        whole = self.config.preference.needs_whole_batch  # rows are compared within a batch
        if ranks > (train.grad_acc if whole else self.rows):
            train = replace(train, batch=train.batch if whole else 1, grad_acc=ranks)
        return self._shard(train, ranks)

    def weak_scaled(self, ranks: int) -> tuple[ShardedStep, int]:
        """Return a step in which each rank has as many rows as one has alone."""
        return self._shard(replace(self.config.train, grad_acc=ranks * self.config.train.grad_acc), ranks)

    def _shard(self, train: TrainOptions, ranks: int) -> tuple[ShardedStep, int]:
        if train.grad_groups and (ranks > train.grad_groups or ranks == 1):
            train = replace(train, grad_groups=None)
        train = split_for_ranks(replace(self.config, train=train), ranks, is_planned=ranks > 1).train
        rows, micro = train.batch, train.grad_acc
        while rows > self.max_rows and rows % 2 == 0:
            rows, micro = rows // 2, micro * 2
        return ShardedStep(
            ranks=ranks,
            micro=micro,
            groups=train.grad_groups or 1,
            trained=self.trained,
            grad_bytes=self.grad_bytes,
        ), rows


# ---- seconds ---------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The parts of a step's time, in seconds."""

    row: float
    overhead: float  # of a micro-batch, independent of its rows
    adding: float  # adding its gradients to others
    update: float

    def micro_batch(self, rows: int) -> float:
        """Return the seconds of a micro-batch."""
        return self.overhead + self.row * rows


def step_time(spec: StepSpec, policy: Policy, speeds: OpSpeeds) -> StepTime:
    """Return the parts of a step's time, extrapolated from one and two rows, and one and two layers."""
    if spec.h.layers > 2 and str(policy) in POLICY_NAMES and layers_are_alike(spec):
        one, two = (vars(_step_time(with_layers(spec, layers), policy, speeds)) for layers in (1, 2))
        more = spec.h.layers - 1
        return StepTime(**{name: value + more * (two[name] - value) for name, value in one.items()})
    return _step_time(spec, policy, speeds)


def _step_time(spec: StepSpec, policy: Policy, speeds: OpSpeeds) -> StepTime:
    length, trained = spec.rope_length, sum(4 * tensor.size for tensor in spec.trainable.values())
    small, large = (StepGraphs(replace(spec, batch=batch), policy) for batch in (1, 2))
    device = spec.device
    if spec.gradients == "streamed":
        one, two = (speeds.graph_seconds(graphs.streamed_graph(length), device) for graphs in (small, large))
        return StepTime(row=two - one, overhead=2 * one - two, adding=0.0, update=0.0)
    one, two = (speeds.graph_seconds(graphs.grad_graph(length, True), device) for graphs in (small, large))
    update = (
        speeds.graph_seconds(small.update_graph(length), device)
        if spec.rule
        else speeds.copy_seconds(4 * trained)
    )
    return StepTime(
        row=two - one, overhead=2 * one - two, adding=speeds.copy_seconds(3 * trained), update=update
    )


def forecast_scaling(
    plan: MemoryPlan, config: RunConfig, bits: float, measure: bool = False
) -> ScalingForecast:
    """Forecast steps on several ranks that are connected by links of this speed (bits per second)."""
    spec, ranks = plan.spec, plan.spec.ranks
    trained = sum(tensor.size for tensor in spec.trainable.values())
    max_rows = spec.batch if plan.splits > 1 else config.train.batch
    step = StepShape(
        config=config, trained=trained, grad_bytes=2 if spec.comm_bf16 else FLOAT, max_rows=max_rows
    )
    speeds = get_speeds(spec, measure)
    assert speeds  # compiling is allowed here
    shared, optimizer = replace(spec, groups=1, ranks=1), spec.optimizer
    assert optimizer
    gradients = choose_gradients(
        config.train, optimizer, reads_base=config.command == "finetune" and not config.tune.full
    )
    alone, sharded = (
        step_time(replace(shared, gradients=mode), plan.policy, speeds) for mode in (gradients, "flat")
    )
    rows = list(forecast_ranks(step, alone, sharded, bits, ranks))
    useful_ranks, next_speedup = find_useful_ranks(step, rows)
    return ScalingForecast(
        step=step.strong_scaled(ranks)[0],
        rows=rows,
        useful_ranks=useful_ranks,
        next_speedup=next_speedup,
        speeds=speeds,
    )


def forecast_ranks(
    step: StepShape, alone: StepTime, sharded: StepTime, bits: float, ranks: int
) -> Iterator[RankForecast]:
    """Yield forecasts for 1, 2, 4 and so on, and for the number of ranks that was asked for."""

    def seconds(shape: ShardedStep, rows: int) -> StepTimeBreakdown:
        """Return the time of a step with micro-batches of this many rows."""
        times = alone if shape.ranks == 1 else sharded
        costs = {"micro": times.micro_batch(rows), "adding": times.adding, "update": times.update}
        return step_seconds(shape, LinkModel(**costs, byte=8 / bits, message=MESSAGE_SECONDS, spread=SPREAD))

    one = seconds(*step.strong_scaled(1)).total / step.rows
    for count in sorted({ranks, *(1 << power for power in range(MAX_RANKS.bit_length()))}):
        if count > 1 and count * step.rows > COUNT:
            break
        shape, batch = step.strong_scaled(count)
        times, rows = seconds(shape, batch), shape.micro * batch
        yield RankForecast(
            ranks=count,
            rows=rows,
            seconds=times,
            efficiency=one * rows / times.total / count,
            weak_efficiency=one * step.rows / seconds(*step.weak_scaled(count)).total,
        )


def find_useful_ranks(step: StepShape, rows: Sequence[RankForecast]) -> tuple[int, float]:
    """Return the ranks up to which doubling them pays, and the speed-up of the next doubling.

    The speed-up is 0 if the step has no rows for twice as many.
    """
    rate = {row.ranks: row.rows_per_second for row in rows if row.rows == step.rows}
    ranks = 1
    while 2 * ranks in rate:
        if (more := rate[2 * ranks] / rate[ranks]) < MIN_SPEEDUP:
            return ranks, more
        ranks *= 2
    return ranks, 0.0
