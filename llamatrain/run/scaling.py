"""What a run takes on several ranks, one on each of as many machines like this one: bytes on the wire, seconds of a step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from llamatrain.config.options import COUNT
from llamatrain.graph.remat_policy import POLICY_NAMES
from llamatrain.planner.extrapolate import alike, shallow
from llamatrain.planner.memory import MemoryPlan
from llamatrain.planner.scaling_model import FLOAT, LinkModel, ShardedStep, StepTimeBreakdown, seconds_of
from llamatrain.planner.speeds import OpSpeeds, speeds_for
from llamatrain.run.config import RunConfig
from llamatrain.run.options import TrainOptions
from llamatrain.run.resolve import divided, gradients_of
from llamatrain.train.graphs import Policy, StepGraphs, StepSpec

MOST = 4096  # ranks that are told of
MESSAGE = 20e-6  # seconds of one, over Ethernet
SPREAD = 0.02  # of ranks' seconds of a step
PAYS = 1.25  # times as fast, at least, that twice as many ranks should be


@dataclass(frozen=True, kw_only=True)
class RankForecast:
    """So many ranks: on the step as it is, or on a row for each where there are more ranks; and where all have as many rows as
    one has alone."""

    ranks: int
    rows: int
    seconds: StepTimeBreakdown
    efficiency: float  # rows a second for each rank, of those that one does alone
    grown: float  # likewise, of the step that grows

    @property
    def rate(self) -> float:
        """Rows a second."""
        return self.rows / self.seconds.total


@dataclass(frozen=True, kw_only=True)
class ScalingForecast:
    step: ShardedStep  # of as many ranks as were asked for
    rows: Sequence[RankForecast]
    pays: int  # ranks up to which twice as many are worth it, for the step as it is
    more: float  # times as fast would those be, then; 0: the step has no rows for them
    speeds: OpSpeeds

    @property
    def sent(self) -> int:
        """Bytes that a rank sends in a step, and as many that it receives."""
        return round(self.step.gradients + self.step.weights)


# ---- a step as it is shared ------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What is asked of one process alone, which other numbers of ranks divide each in its way."""

    asked: RunConfig
    trained: int
    wire: int
    most: int  # rows of a micro-batch, for which there is memory

    @property
    def rows(self) -> int:
        return self.asked.train.batch * self.asked.train.grad_acc

    def shared(self, ranks: int) -> tuple[ShardedStep, int]:
        """The same step on so many ranks, and the rows of its micro-batches; one row for each where it has fewer than that."""
        train = self.asked.train
        whole = self.asked.preference.data_kind == "answers"  # which are compared within a batch
        if ranks > (train.grad_acc if whole else self.rows):
            train = replace(train, batch=train.batch if whole else 1, grad_acc=ranks)
        return self._divided(train, ranks)

    def grown(self, ranks: int) -> tuple[ShardedStep, int]:
        """As many rows for each as one has alone."""
        return self._divided(replace(self.asked.train, grad_acc=ranks * self.asked.train.grad_acc), ranks)

    def _divided(self, train: TrainOptions, ranks: int) -> tuple[ShardedStep, int]:
        if train.grad_groups and (ranks > train.grad_groups or ranks == 1):
            train = replace(train, grad_groups=None)
        train = divided(replace(self.asked, train=train), ranks, planned=ranks > 1).train
        rows, micro = train.batch, train.grad_acc
        while rows > self.most and rows % 2 == 0:
            rows, micro = rows // 2, micro * 2
        return ShardedStep(
            ranks=ranks, micro=micro, groups=train.grad_groups or 1, trained=self.trained, wire=self.wire
        ), rows


# ---- seconds ---------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Of a model, in seconds."""

    row: float
    beside: float  # of a micro-batch, whatever its rows
    adding: float  # its gradients to others
    update: float

    def micro(self, rows: int) -> float:
        return self.beside + self.row * rows


def effort_of(setting: StepSpec, policy: Policy, speeds: OpSpeeds) -> StepTime:
    """All grows evenly with rows and with layers, so that few of either will do."""
    if setting.h.layers > 2 and str(policy) in POLICY_NAMES and alike(setting):
        one, two = (vars(_effort_of(shallow(setting, layers), policy, speeds)) for layers in (1, 2))
        more = setting.h.layers - 1
        return StepTime(**{name: value + more * (two[name] - value) for name, value in one.items()})
    return _effort_of(setting, policy, speeds)


def _effort_of(setting: StepSpec, policy: Policy, speeds: OpSpeeds) -> StepTime:
    length, trained = setting.positions, sum(4 * tensor.size for tensor in setting.trainable.values())
    small, large = (StepGraphs(replace(setting, batch=batch), policy) for batch in (1, 2))
    if setting.gradients == "streamed":
        one, two = (speeds.of_graph(graphs.streamed_graph(length)) for graphs in (small, large))
        return StepTime(row=two - one, beside=2 * one - two, adding=0.0, update=0.0)
    one, two = (speeds.of_graph(graphs.grad_graph(length, True)) for graphs in (small, large))
    update = speeds.of_graph(small.update_graph(length)) if setting.rule else speeds.of_bytes(4 * trained)
    return StepTime(row=two - one, beside=2 * one - two, adding=speeds.of_bytes(3 * trained), update=update)


def foretold(way: MemoryPlan, asked: RunConfig, bits: float, anew: bool = False) -> ScalingForecast:
    """Of a way to run it on several ranks, over links of so many bits a second."""
    setting, ranks = way.setting, way.setting.ranks
    trained = sum(tensor.size for tensor in setting.trainable.values())
    most = setting.batch if way.splits > 1 else asked.train.batch
    step = StepShape(asked=asked, trained=trained, wire=2 if setting.comm_bf16 else FLOAT, most=most)
    speeds = speeds_for(setting, anew)
    assert speeds  # here all may be compiled
    shared, optimizer = replace(setting, groups=1, ranks=1), setting.optimizer
    assert optimizer
    own = gradients_of(asked.train, optimizer, reads_base=asked.command == "finetune" and not asked.tune.full)
    alone, among = (effort_of(replace(shared, gradients=each), way.policy, speeds) for each in (own, "flat"))
    rows = list(rows_of(step, alone, among, bits, ranks))
    pays, more = paying(step, rows)
    return ScalingForecast(step=step.shared(ranks)[0], rows=rows, pays=pays, more=more, speeds=speeds)


def rows_of(
    step: StepShape, alone: StepTime, among: StepTime, bits: float, ranks: int
) -> Iterator[RankForecast]:
    """For 1, 2, 4 and so on, and for those that are asked for, as far as rows can be counted."""

    def seconds(of: ShardedStep, rows: int) -> StepTimeBreakdown:
        """With micro-batches of so many rows."""
        effort = alone if of.ranks == 1 else among
        own = {"micro": effort.micro(rows), "adding": effort.adding, "update": effort.update}
        return seconds_of(of, LinkModel(**own, byte=8 / bits, message=MESSAGE, spread=SPREAD))

    one = seconds(*step.shared(1)).total / step.rows
    for count in sorted({ranks, *(1 << power for power in range(MOST.bit_length()))}):
        if count > 1 and count * step.rows > COUNT:
            break
        same, batch = step.shared(count)
        found, rows = seconds(same, batch), same.micro * batch
        yield RankForecast(
            ranks=count,
            rows=rows,
            seconds=found,
            efficiency=one * rows / found.total / count,
            grown=one * step.rows / seconds(*step.grown(count)).total,
        )


def paying(step: StepShape, rows: Sequence[RankForecast]) -> tuple[int, float]:
    """Up to how many ranks twice as many are worth it for this step, and how many times as fast those would be; 0 where it has
    no rows for them."""
    rate = {row.ranks: row.rate for row in rows if row.rows == step.rows}
    ranks = 1
    while 2 * ranks in rate:
        if (more := rate[2 * ranks] / rate[ranks]) < PAYS:
            return ranks, more
        ranks *= 2
    return ranks, 0.0
