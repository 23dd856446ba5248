"""Forecasts how long a run takes, from the measured speed of this machine."""

from dataclasses import dataclass

from llamatrain.planner.cost import plan_cost
from llamatrain.planner.memory import MemoryPlan
from llamatrain.planner.speeds import OpSpeeds, get_speeds

OVERHEAD = 5e-4  # seconds of a step that are between its programs


@dataclass(frozen=True, kw_only=True)
class TimeForecast:
    """The time of a run's steps, without validation, samples and saves."""

    step_seconds: float  # seconds
    tokens: int  # per step, with padding
    steps: int | None  # remaining steps; None: unknown
    speeds: OpSpeeds

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second, including padding."""
        return self.tokens / self.step_seconds

    @property
    def run_seconds(self) -> float | None:
        """Seconds of all steps, or None if their number is not known."""
        return None if self.steps is None else self.steps * self.step_seconds


def forecast_time(
    plan: MemoryPlan, batches: int, steps: int | None, measure: bool = False
) -> TimeForecast | str:
    """Forecast steps of this many batches, or return why that is not possible. `measure` measures again."""
    spec, optimizer = plan.spec, plan.spec.optimizer
    if optimizer and not spec.rule:
        return f"unknown: the number of evaluations per step of {type(optimizer).__name__} varies"
    speeds = get_speeds(spec, measure)
    if speeds is None:
        return "known once a first run has compiled the kernels"
    seconds = plan_cost(plan, batches, speeds.node_seconds)
    tokens = batches * plan.splits * spec.batch * spec.rope_length
    return TimeForecast(step_seconds=seconds + OVERHEAD, tokens=tokens, steps=steps, speeds=speeds)
