"""Tries some steps of a run, to find out how long they take."""

import time
from dataclasses import dataclass

from llamatrain.distributed.comm import get_comm
from llamatrain.report.records import StepLine
from llamatrain.run.build import build_loop, build_programs, run_loop
from llamatrain.run.prepare import prepare, start_request
from llamatrain.run.rank_roles import NullListener
from llamatrain.run.request import RunRequest
from llamatrain.run.signals import Interrupts
from llamatrain.train.state import RunState

FIRST_STEPS = 3  # slower than the others, and not counted
STEPS_ONLY = {  # options of a run that only trains, and stops after --iters
    "warmup": 0,
    "eval_every": 0,
    "sample_every": 0,
    "stop_window": 0,
    "max_no_improvement": 0,
}


@dataclass(frozen=True, kw_only=True)
class StepTrial:
    """Times that a trial took."""

    prepare_seconds: float  # until the first step
    step_seconds: float  # mean


class StepClock(NullListener):
    """Remembers when steps end."""

    def __init__(self) -> None:
        self.times = list[float]()

    def on_step(self, line: StepLine) -> None:
        """Remember the time."""
        self.times.append(time.monotonic())


class NoSaves:
    """Saves nothing of a run."""

    def begin(self, state: RunState) -> str:
        """Save nothing before the first step."""
        return ""

    def save(self, state: RunState, last: bool = False) -> str:
        """Save nothing."""
        return ""

    def end(self, state: RunState) -> None:
        """Save nothing at the end."""

    def keep_best(self, state: RunState) -> None:
        """Keep nothing."""


def try_steps(request: RunRequest, steps: int, interrupts: Interrupts) -> StepTrial:
    """Train a few steps of a run, and return the times that it took (collective)."""
    start = time.monotonic()
    steps += FIRST_STEPS
    request = request.with_options({**STEPS_ONLY, "iters": steps})
    config, inputs, _ = start_request(request)
    prepared = prepare(config, inputs, None, [], request.changed)
    programs = build_programs(prepared)
    clock = StepClock()
    loop = build_loop(prepared, programs, clock, interrupts)
    prepare_seconds = time.monotonic() - start
    run_loop(loop, prepared.data.rows, NoSaves(), lambda: None)
    mean = (clock.times[-1] - clock.times[FIRST_STEPS - 1]) / (len(clock.times) - FIRST_STEPS)
    return get_comm().broadcast(StepTrial(prepare_seconds=prepare_seconds, step_seconds=mean))
