"""How long a run is expected to take, of what was measured of this machine."""

from dataclasses import dataclass

from llamatrain.model.limits import MANY_LAYERS
from llamatrain.planner.cost import StepCost, step_cost
from llamatrain.planner.memory import MemoryPlan
from llamatrain.planner.speeds import OpSpeeds, get_speeds

OVERHEAD = 5e-4  # seconds of a step that are between its programs


@dataclass(frozen=True, kw_only=True)
class TimeForecast:
    """Of a run's steps; what is done beside them takes its own time."""

    step_seconds: float  # seconds
    tokens: int  # of a step: with what rows are filled up with
    steps: int | None  # that are to come, where that is known
    speeds: OpSpeeds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds

    @property
    def run_seconds(self) -> float | None:
        return None if self.steps is None else self.steps * self.step_seconds


def forecast_time(
    way: MemoryPlan, batches: int, steps: int | None, measure: bool = False
) -> TimeForecast | str:
    """Of steps of so many batches, each in the parts of the way; or why nothing can be said. `anew` measures again."""
    spec, optimizer = way.spec, way.spec.optimizer
    if optimizer and not spec.rule:
        return f"how often {type(optimizer).__name__} looks at a step's rows is not known before"
    speeds = get_speeds(spec, measure)
    if speeds is None:
        return "it is known once a first run has compiled the kernels"
    length, micro_batches = spec.positions, batches * way.splits
    if spec.h.layers > MANY_LAYERS:
        seconds = StepCost(spec, length, micro_batches, speeds.node_seconds).cost(way.policy)
    else:
        seconds = step_cost(way.graphs, length, micro_batches, speeds.node_seconds)
    tokens = micro_batches * spec.batch * length
    return TimeForecast(step_seconds=seconds + OVERHEAD, tokens=tokens, steps=steps, speeds=speeds)
