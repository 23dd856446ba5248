"""What a run takes on several ranks, one on each of as many machines like this one: bytes on the wire, seconds of a step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from llamatrain.recipe.deep import alike, shallow
from llamatrain.recipe.memory import Way
from llamatrain.recipe.speeds import Speeds, speeds_for
from llamatrain.recipe.tempo import FLOAT, Seconds, Shared, Tempo, seconds_of
from llamatrain.train.graphs import Policy, RunGraphs, Setting

MOST = 4096  # ranks that are told of
MESSAGE = 20e-6  # seconds of one, over Ethernet
SPREAD = 0.02  # of ranks' seconds of a step
GROUPS = 8  # that a step is parted in, if it has so many rows
PAYS = 1.25  # times as fast, at least, that twice as many ranks should be


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """So many ranks: on the step as it is, or on a row for each where there are more ranks; and where all have as many rows as
    one has alone."""

    ranks: int
    rows: int
    seconds: Seconds
    efficiency: float  # rows a second for each rank, of those that one does alone
    grown: float  # likewise, of the step that grows

    @property
    def rate(self) -> float:
        """Rows a second."""
        return self.rows / self.seconds.total


@dataclass(frozen=True, kw_only=True)
class Foretold:
    step: Shared  # of as many ranks as were asked for
    rows: Sequence[Ranked]
    pays: int  # ranks up to which twice as many are worth it, for the step as it is
    more: float  # times as fast would those be, then; 0: the step has no rows for them
    when: float  # speeds were measured

    @property
    def sent(self) -> int:
        """Bytes that a rank sends in a step, and as many that it receives."""
        return round(self.step.gradients + self.step.weights)


# ---- a step as it is shared ------------------------------------------------


def groups_for(ranks: int, rows: int) -> int:
    """A power of two: 8, or what has one for each rank, as far as there are rows."""
    return min(max(GROUPS, power(ranks)), power(rows + 1) // 2)


def power(count: int) -> int:
    """Of two, that is no less."""
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True, kw_only=True)
class OneStep:
    """A step as one machine alone runs it."""

    batch: int  # rows of a micro-batch
    micro: int
    trained: int
    wire: int

    @property
    def rows(self) -> int:
        return self.batch * self.micro

    def shared(self, ranks: int) -> tuple[Shared, int]:
        """The same step on so many ranks, and the rows of its micro-batches; one row for each rank where it has fewer."""
        if ranks == 1:
            return self._shared(1, self.micro, 1), self.batch
        rows = max(ranks, self.rows)
        groups, batch, micro = groups_for(ranks, rows), self.batch, self.micro
        if rows > self.rows:
            batch, micro = 1, rows
        while micro < groups:
            parts = next(parts for parts in range(2, batch + 1) if batch % parts == 0)
            batch, micro = batch // parts, micro * parts
        return self._shared(ranks, micro, groups), batch

    def grown(self, ranks: int) -> Shared:
        """As many rows for each as one has alone."""
        return self._shared(ranks, ranks * self.micro, power(ranks) if ranks > 1 else 1)

    def _shared(self, ranks: int, micro: int, groups: int) -> Shared:
        return Shared(ranks=ranks, micro=micro, groups=groups, trained=self.trained, wire=self.wire)


# ---- seconds ---------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Of a model, in seconds."""

    row: float
    beside: float  # of a micro-batch, whatever its rows
    adding: float  # its gradients to others
    update: float

    def micro(self, rows: int) -> float:
        return self.beside + self.row * rows


def effort_of(setting: Setting, policy: Policy, speeds: Speeds) -> Effort:
    """All grows evenly with rows and with layers, so that few of either will do."""
    if setting.h.layers > 2 and not isinstance(policy, int) and alike(setting):
        one, two = (vars(_effort_of(shallow(setting, layers), policy, speeds)) for layers in (1, 2))
        more = setting.h.layers - 1
        return Effort(**{name: value + more * (two[name] - value) for name, value in one.items()})
    return _effort_of(setting, policy, speeds)


def _effort_of(setting: Setting, policy: Policy, speeds: Speeds) -> Effort:
    length, trained = setting.positions, sum(4 * tensor.size for tensor in setting.trained.values())
    small, large = (RunGraphs(replace(setting, batch=batch), policy) for batch in (1, 2))
    if setting.gradients == "streamed":
        one, two = (speeds.of_graph(graphs.streamed(length)) for graphs in (small, large))
        return Effort(row=two - one, beside=2 * one - two, adding=0.0, update=0.0)
    one, two = (speeds.of_graph(graphs.gradients(length, True)) for graphs in (small, large))
    update = speeds.of_graph(small.update(length)) if setting.rule else speeds.of_bytes(4 * trained)
    return Effort(row=two - one, beside=2 * one - two, adding=speeds.of_bytes(3 * trained), update=update)


def foretold(way: Way, batches: int, ranks: int, bits: float, wire: int = FLOAT) -> Foretold:
    """Of a step of so many batches, over links of so many bits a second."""
    setting = way.setting
    trained = sum(tensor.size for tensor in setting.trained.values())
    step = OneStep(batch=setting.batch, micro=way.splits * batches, trained=trained, wire=wire)
    speeds = speeds_for(setting)
    alone, shared = (effort_of(each, way.policy, speeds) for each in (setting, replace(setting, gradients="flat")))
    rows = list(rows_of(step, alone, shared, bits, ranks))
    pays, more = paying(step, rows)
    return Foretold(step=step.shared(ranks)[0], rows=rows, pays=pays, more=more, when=speeds.when)


def rows_of(step: OneStep, alone: Effort, shared: Effort, bits: float, ranks: int) -> Iterator[Ranked]:
    """For 1, 2, 4 and so on, and for those that are asked for."""

    def seconds(of: Shared, rows: int) -> Seconds:
        """With micro-batches of so many rows."""
        effort = alone if of.ranks == 1 else shared
        own = {"micro": effort.micro(rows), "adding": effort.adding, "update": effort.update}
        return seconds_of(of, Tempo(**own, byte=8 / bits, message=MESSAGE, spread=SPREAD))

    one = seconds(step.shared(1)[0], step.batch).total / step.rows
    for count in sorted({ranks, *(1 << power for power in range(MOST.bit_length()))}):
        (same, batch), grown = step.shared(count), step.grown(count)
        found, rows = seconds(same, batch), same.micro * batch
        yield Ranked(
            ranks=count,
            rows=rows,
            seconds=found,
            efficiency=one * rows / found.total / count,
            grown=one * step.rows / seconds(grown, step.batch).total,
        )


def paying(step: OneStep, rows: Sequence[Ranked]) -> tuple[int, float]:
    """Up to how many ranks twice as many are worth it for this step, and how many times as fast those would be; 0 where it has
    no rows for them."""
    rate = {row.ranks: row.rate for row in rows if row.rows == step.rows}
    ranks = 1
    while 2 * ranks in rate:
        if (more := rate[2 * ranks] / rate[ranks]) < PAYS:
            return ranks, more
        ranks *= 2
    return ranks, 0.0
