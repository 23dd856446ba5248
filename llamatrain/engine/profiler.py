"""Profiles a run: phases of its start, and the ops of its steps.

Without a recorder, a program runs as bound, and a phase does nothing. With one, each op of a training program
runs by itself and is timed from outside: the same calls in the same order give the same bits, a little later.
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
from typing import Any, NamedTuple, Protocol

from llamatrain.graph.node_roles import NodeRole
from llamatrain.graph.op_cost import OpCost, estimate_cost
from llamatrain.graph.tensor import Node

Run = Callable[[], None]
clock = time.perf_counter
TRACED_STEPS = 3  # steps whose ops are recorded one by one
MAX_OPS, MAX_SPANS = 10_000, 10_000  # the most ops; the most phases and steps
IMPORTS = "Python and imports"
MIN_IMPORT = 1e-4  # the shortest recorded import, in seconds
NOTHING = nullcontext()
_recorders = list["Recorder"]()


class Clock(Protocol):
    """The clock of a device."""

    def mark(self) -> Any:
        """Return the moment at which all work that was issued so far will be done."""

    def seconds(self, moment: Any) -> float:
        """Wait for a moment, and return it in seconds of `time.perf_counter`."""


class TraceSpan(NamedTuple):
    """Something that took time, in seconds of the clock."""

    name: str
    kind: str
    start: float
    end: float
    node: Node | None = None


@dataclass
class OpenPhase:
    """A phase that has not ended."""

    name: str
    start: float
    inner: float = 0.0  # seconds of phases inside it


@dataclass(eq=False)
class OpTimer:
    """An op of a program, and its time in complete steps."""

    node: Node
    role: NodeRole
    cost: OpCost
    calls: int = 0
    seconds: float = 0.0
    _pending_calls: int = 0  # calls in the current step
    _pending_seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Add a call of the current step."""
        self._pending_calls += 1
        self._pending_seconds += seconds

    def commit(self) -> None:
        """Add the current step's calls to the totals."""
        self.calls, self.seconds = self.calls + self._pending_calls, self.seconds + self._pending_seconds
        self.discard()

    def discard(self) -> None:
        """Discard the current step's calls."""
        self._pending_calls, self._pending_seconds = 0, 0.0


class Recorder:
    """Records one run in the thread that created it; `before` are seconds that passed before."""

    def __init__(self, before: float = 0.0) -> None:
        now = clock()
        self.start_time = now - before
        self.first_op_time: float | None = None  # the first op of the first step
        self.startup: dict[str, float] = defaultdict(float)  # phases before it, without inner phases
        self.between_steps: dict[str, float] = defaultdict(float)  # phases between steps, with inner phases
        self.ops: list[OpTimer] = []
        # complete steps, their seconds, and those spent waiting for rows
        self.steps, self.seconds, self.waited = 0, 0.0, 0.0
        self.spans: list[TraceSpan] = []
        self.traced: list[TraceSpan] = []  # ops of the traced steps
        self.traced_steps: list[int] = []
        self.dropped = 0  # spans
        self.trace: Path | None = None  # the trace file
        self._thread = threading.get_ident()
        self._open_phases: list[OpenPhase] = []
        self._timed: list[tuple[OpTimer, Clock, Any, Any]] = []  # ops of the current step, with two moments
        self._step_start = now  # the start of the next step
        self._step_first_op: float | None = None  # the first op of the current step
        if before:
            self.startup[IMPORTS] = before
            self._add_span(TraceSpan(IMPORTS, "start", self.start_time, now))

    @property
    def ops_are_full(self) -> bool:
        """True if more ops ran in the traced steps than are kept."""
        return len(self.traced) >= MAX_OPS

    @property
    def is_own_thread(self) -> bool:
        """True in the thread that created the recorder."""
        return threading.get_ident() == self._thread

    # ---- phases ------------------------------------------------------------

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the time of a block as a phase."""
        self._open_phases.append(OpenPhase(name, clock()))
        try:
            yield
        finally:
            self._end_phase(self._open_phases.pop(), clock())

    def _end_phase(self, phase: OpenPhase, end: float) -> None:
        name = phase.name
        start = phase.start
        is_between_steps = not self._open_phases and self._step_first_op is None
        if self._open_phases:
            self._open_phases[-1].inner += end - start
        if self.first_op_time is None:
            self.startup[name] += end - start - phase.inner
        elif is_between_steps:
            self.between_steps[name] += end - start
        if is_between_steps:
            self._step_start = end
        if end - start >= MIN_IMPORT or name != IMPORTS:
            self._add_span(TraceSpan(name, "start" if self.first_op_time is None else "beside", start, end))

    def _add_span(self, span: TraceSpan) -> None:
        if len(self.spans) < MAX_SPANS:
            self.spans.append(span)
        else:
            self.dropped += 1

    def startup_times(self) -> tuple[dict[str, float], float]:
        """Return the seconds of each phase until the first step or now, and the total."""
        now, phases = self.first_op_time or clock(), dict(self.startup)
        if self.first_op_time is None:
            inner = now
            for phase in reversed(self._open_phases):
                phases[phase.name] = phases.get(phase.name, 0.0) + inner - phase.start - phase.inner
                inner = phase.start
        return phases, now - self.start_time

    # ---- steps -------------------------------------------------------------

    def time_ops(self, steps: Iterable[tuple[Node, NodeRole, list[Run]]], device: Clock) -> list[Run]:
        """Return a timed callable for each op."""
        return [
            self._time_op(OpTimer(node, part, estimate_cost(node)), runs, device)
            for node, part, runs in steps
            if runs
        ]

    def _time_op(self, op: OpTimer, runs: Sequence[Run], device: Clock) -> Run:
        self.ops.append(op)

        def run() -> None:
            if self._step_first_op is None:
                self._begin_step(clock())
            start = device.mark()
            for each in runs:
                each()
            self._timed.append((op, device, start, device.mark()))

        return run

    def _add_timed(self) -> None:
        """Wait for the ops of the current step, and add their times."""
        for op, device, first, last in self._timed:
            start, end = device.seconds(first), device.seconds(last)
            op.add(end - start)
            if self.steps < TRACED_STEPS and not self.ops_are_full:
                self.traced.append(TraceSpan(op.node.op.name, op.role, start, end, op.node))
        self._timed.clear()

    def _begin_step(self, start: float) -> None:
        self._step_first_op = start
        if self.first_op_time is None:
            self.first_op_time = self._step_start = start

    def end_step(self, number: int, waited: float) -> None:
        """Record the end of a step that waited `waited` seconds for its rows."""
        self._add_timed()
        now = clock()
        first = now if self._step_first_op is None else self._step_first_op
        self.steps, self.seconds = self.steps + 1, self.seconds + now - self._step_start
        self.waited += min(waited, max(0.0, first - self._step_start))
        for op in self.ops:
            op.commit()
        self._add_span(TraceSpan(f"step {number}", "step", self._step_start, now))
        if self.steps <= TRACED_STEPS and self.traced and self.traced[-1].start >= self._step_start:
            self.traced_steps.append(number)
        self._step_first_op = None

    def discard_step(self) -> None:
        """Discard what ran since the last step: it belongs to no step."""
        self._timed.clear()
        for op in self.ops:
            op.discard()
        self._step_start, self._step_first_op = clock(), None


# ---- who asks --------------------------------------------------------------


@contextmanager
def record(recorder: Recorder) -> Iterator[None]:
    """Record phases, programs that are bound, and imports while the block runs."""
    original_import = builtins.__import__

    def timed(name: str, *how: Any, **more: Any) -> ModuleType:
        with NOTHING if name in sys.modules or not recorder.is_own_thread else recorder.phase(IMPORTS):
            return original_import(name, *how, **more)

    _recorders.append(recorder)
    builtins.__import__ = timed
    try:
        yield
    finally:
        builtins.__import__ = original_import
        _recorders.remove(recorder)


def current_recorder() -> Recorder | None:
    """Return this thread's recorder, or None."""
    return next((each for each in reversed(_recorders) if each.is_own_thread), None) if _recorders else None


def phase(name: str) -> AbstractContextManager[None]:
    """Record the time of a block as a phase, if there is a recorder."""
    recorder = current_recorder()
    return recorder.phase(name) if recorder else NOTHING
