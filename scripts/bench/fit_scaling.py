"""Fits the model of a step on several ranks to steps that were timed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from llamatrain.planner.scaling_model import LinkModel, ShardedStep, step_seconds
from llamatrain.planner.speeds import least_squares

STARTS = (1.0, 0.5, 0.1)  # first guesses of the share of a step that is spent computing


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """A step that was timed. Ranks beyond the processors of a host take turns."""

    step: ShardedStep
    seconds: float
    ranks_per_host: int = 1
    crowding: float = 1.0  # ranks per processor, if more than one


def predict_seconds(timed: TimedStep, link: LinkModel) -> float:
    """Return how long the model expects a step to take."""
    slower = replace(link, micro=timed.crowding * link.micro, update=timed.crowding * link.update)
    return step_seconds(timed.step, slower, timed.ranks_per_host).total


def fit_link_model(cases: Sequence[TimedStep], rounds: int = 20) -> LinkModel:
    """Fit the model with the least relative errors.

    A step's seconds are linear in each unknown until computing no longer hides communication. The fit is
    therefore repeated from where it ended, from several first guesses.
    """
    seconds = [case.seconds for case in cases]
    micro = min(case.seconds / case.step.max_micro / case.crowding for case in cases)
    solutions = list[np.ndarray]()
    for start in STARTS:
        x = np.array([start * micro, 1e-3, 1e-9, 1e-5, 1e-3])
        for _ in range(rounds):
            columns = [[_slope(case, x, index) for case in cases] for index in range(len(x))]
            before, x = x, least_squares(columns, seconds)
            solutions.append(x)
            if np.allclose(before, x, rtol=1e-9, atol=0):
                break

    def squared_error(x: np.ndarray) -> float:
        return sum((predict_seconds(case, _link_model(x)) / case.seconds - 1) ** 2 for case in cases)

    return _link_model(min(solutions, key=squared_error))


def _link_model(x: np.ndarray) -> LinkModel:
    micro, update, byte, message, late = map(float, x)
    return LinkModel(micro=micro, update=update, byte=byte, message=message, spread=late / max(micro, 1e-12))


def _slope(case: TimedStep, x: np.ndarray, index: int) -> float:
    """Return the derivative of a case's seconds by one of the unknowns."""
    more = x.copy()
    more[index] += max(1e-6 * x[index], 1e-12)
    change = predict_seconds(case, _link_model(more)) - predict_seconds(case, _link_model(x))
    return change / float(more[index] - x[index])
