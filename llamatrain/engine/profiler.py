"""Where the time of a run goes: phases of its start, and the ops of its steps, by a clock that somebody has to ask for.

Where nobody does, a program runs as it is bound, and a phase is nothing. Else each op of a program that trains is run by
itself and timed from outside: the same calls in the same order, so that the same bits come out, a little later.
"""

import builtins
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from llamatrain.graph.node_roles import Part
from llamatrain.graph.op_cost import OpCost, work_of
from llamatrain.graph.tensor import Node

Run = Callable[[], None]
clock = time.perf_counter
TRACED = 3  # steps whose ops are kept one by one
OPS, SPANS = 10_000, 10_000  # of these at most; and of phases and steps
IMPORTS = "Python and imports"
LEAST = 1e-4  # seconds of an import that is kept
NOTHING = nullcontext()
_asked = list["Recorder"]()


class TraceSpan(NamedTuple):
    """Something that was done, in seconds of the clock."""

    name: str
    kind: str
    start: float
    end: float
    node: Node | None = None


@dataclass
class OpenPhase:
    """One that is open."""

    name: str
    start: float
    within: float = 0.0  # seconds of those that were open in it


@dataclass(eq=False)
class OpTimer:
    """An op of a program, and what it took in whole steps."""

    node: Node
    part: Part
    work: OpCost
    calls: int = 0
    seconds: float = 0.0
    _runs: int = 0  # of the step that is under way
    _taken: float = 0.0

    def add(self, seconds: float) -> None:
        self._runs += 1
        self._taken += seconds

    def settle(self) -> None:
        self.calls, self.seconds = self.calls + self._runs, self.seconds + self._taken
        self.drop()

    def drop(self) -> None:
        self._runs, self._taken = 0, 0.0


class Recorder:
    """Of one run, by the thread that it is in; `before` are seconds that had gone by."""

    def __init__(self, before: float = 0.0) -> None:
        now = clock()
        self.begun = now - before
        self.started: float | None = None  # the first op of the first step
        self.start: dict[str, float] = defaultdict(float)  # phases until then, each without those within it
        self.beside: dict[str, float] = defaultdict(float)  # those between steps, as wholes
        self.ops: list[OpTimer] = []
        self.steps, self.seconds, self.waited = 0, 0.0, 0.0  # whole steps, and of these: for rows
        self.spans: list[TraceSpan] = []
        self.traced: list[TraceSpan] = []  # ops, of these steps
        self.traced_steps: list[int] = []
        self.dropped = 0  # spans
        self.trace: Path | None = None  # where they were written
        self._thread = threading.get_ident()
        self._open: list[OpenPhase] = []
        self._mark = now  # where the step begins that comes next
        self._first: float | None = None  # op of the step that is under way
        if before:
            self.start[IMPORTS] = before
            self._note(TraceSpan(IMPORTS, "start", self.begun, now))

    @property
    def full(self) -> bool:
        """More ops were run in those steps than are kept."""
        return len(self.traced) >= OPS

    @property
    def here(self) -> bool:
        return threading.get_ident() == self._thread

    # ---- phases ------------------------------------------------------------

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._open.append(OpenPhase(name, clock()))
        try:
            yield
        finally:
            self._took(self._open.pop(), clock())

    def _took(self, phase: OpenPhase, end: float) -> None:
        name, start, between = phase.name, phase.start, not self._open and self._first is None
        if self._open:
            self._open[-1].within += end - start
        if self.started is None:
            self.start[name] += end - start - phase.within
        elif between:
            self.beside[name] += end - start
        if between:
            self._mark = end
        if end - start >= LEAST or name != IMPORTS:
            self._note(TraceSpan(name, "start" if self.started is None else "beside", start, end))

    def _note(self, span: TraceSpan) -> None:
        if len(self.spans) < SPANS:
            self.spans.append(span)
        else:
            self.dropped += 1

    def started_so_far(self) -> tuple[dict[str, float], float]:
        """The seconds of each phase until the first step, or until now, those that are open included; and of all."""
        now, found = self.started or clock(), dict(self.start)
        if self.started is None:
            inner = now
            for phase in reversed(self._open):
                found[phase.name] = found.get(phase.name, 0.0) + inner - phase.start - phase.within
                inner = phase.start
        return found, now - self.begun

    # ---- steps -------------------------------------------------------------

    def timed(self, steps: Iterable[tuple[Node, Part, list[Run]]]) -> list[Run]:
        """Each op by itself, with the clock around it."""
        return [self._timed(OpTimer(node, part, work_of(node)), runs) for node, part, runs in steps if runs]

    def _timed(self, op: OpTimer, runs: Sequence[Run]) -> Run:
        self.ops.append(op)

        def run() -> None:
            start = clock()
            if self._first is None:
                self._begin(start)
            for each in runs:
                each()
            end = clock()
            op.add(end - start)
            if self.steps < TRACED and not self.full:
                self.traced.append(TraceSpan(op.node.op.name, op.part, start, end, op.node))

        return run

    def _begin(self, start: float) -> None:
        self._first = start
        if self.started is None:
            self.started = self._mark = start

    def step(self, number: int, waited: float) -> None:
        """A step is done; it waited so long for its rows."""
        now = clock()
        first = now if self._first is None else self._first
        self.steps, self.seconds = self.steps + 1, self.seconds + now - self._mark
        self.waited += min(waited, max(0.0, first - self._mark))
        for op in self.ops:
            op.settle()
        self._note(TraceSpan(f"step {number}", "step", self._mark, now))
        if self.steps <= TRACED and self.traced and self.traced[-1].start >= self._mark:
            self.traced_steps.append(number)
        self._first = None

    def go_on(self) -> None:
        """What was done since then is of no step."""
        for op in self.ops:
            op.drop()
        self._mark, self._first = clock(), None


# ---- who asks --------------------------------------------------------------


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """While this is open it is told of phases, of programs that are bound, and of what is imported."""
    load = builtins.__import__

    def timed(name: str, *how: Any, **more: Any) -> ModuleType:
        with NOTHING if name in sys.modules or not recorder.here else recorder.phase(IMPORTS):
            return load(name, *how, **more)

    _asked.append(recorder)
    builtins.__import__ = timed
    try:
        yield
    finally:
        builtins.__import__ = load
        _asked.remove(recorder)


def current() -> Recorder | None:
    """Who asked in this thread, if anybody."""
    return next((each for each in reversed(_asked) if each.here), None) if _asked else None


def phase(name: str) -> AbstractContextManager[None]:
    recorder = current()
    return recorder.phase(name) if recorder else NOTHING
