"""How long a run is expected to take, of what was measured of this machine."""

from dataclasses import dataclass

from llamatrain.model.limits import MANY_LAYERS
from llamatrain.planner.cost import StepCost, step_of
from llamatrain.planner.memory import MemoryPlan
from llamatrain.planner.speeds import OpSpeeds, speeds_for

AROUND = 5e-4  # seconds of a step that are between its programs


@dataclass(frozen=True, kw_only=True)
class TimeForecast:
    """Of a run's steps; what is done beside them takes its own time."""

    step: float  # seconds
    tokens: int  # of a step: with what rows are filled up with
    steps: int | None  # that are to come, where that is known
    speeds: OpSpeeds

    @property
    def rate(self) -> float:
        return self.tokens / self.step

    @property
    def run(self) -> float | None:
        return None if self.steps is None else self.steps * self.step


def expected(way: MemoryPlan, batches: int, steps: int | None, anew: bool = False) -> TimeForecast | str:
    """Of steps of so many batches, each in the parts of the way; or why nothing can be said. `anew` measures again."""
    setting, optimizer = way.setting, way.setting.optimizer
    if optimizer and not setting.rule:
        return f"how often {type(optimizer).__name__} looks at a step's rows is not known before"
    speeds = speeds_for(setting, anew)
    if speeds is None:
        return "it is known once a first run has compiled the kernels"
    length, micro = setting.positions, batches * way.splits
    if setting.h.layers > MANY_LAYERS:
        seconds = StepCost(setting, length, micro, speeds.of).cost(way.policy)
    else:
        seconds = step_of(way.graphs, length, micro, speeds.of)
    tokens = micro * setting.batch * length
    return TimeForecast(step=seconds + AROUND, tokens=tokens, steps=steps, speeds=speeds)
