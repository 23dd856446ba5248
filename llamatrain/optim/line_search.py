"""Line search: bracketing, with cubic interpolation inside the bracket.

Three conditions, each containing the one before (slopes are along the direction):

    armijo         the loss falls by at least SUFFICIENT times what the slope at the start predicts
    wolfe          and the slope has risen to CURVATURE times the one at the start
    strong-wolfe   and it is not steeper than that upwards

All are one loop. `low` fell enough but still goes down steeply; `high` is too far: it did not fall enough, or
goes up steeply, or is not finite. Such a bracket always contains a step that meets the condition, and each
evaluation shrinks it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

SUFFICIENT, CURVATURE = 1e-4, 0.9
MAX_EVALUATIONS = 20
PATIENCE = 10  # evaluations in a row without a new lowest loss
EXPAND = 2.0  # factor of the step while nothing is too far
MARGIN = 0.1  # an interpolated step keeps this share of the bracket from its ends


class Condition(NamedTuple):
    """The parts of a condition beyond sufficient decrease."""

    curvature: bool  # the slope must have risen
    strong: bool  # but not too much


SEARCHES = {
    "armijo": Condition(False, False),
    "wolfe": Condition(True, False),
    "strong-wolfe": Condition(True, True),
}


@dataclass(frozen=True)
class Line:
    """The loss along a direction: `at(length)` returns loss and slope; those at length 0 are given."""

    at: Callable[[float], tuple[float, float]]
    loss: float
    slope: float


class Point(NamedTuple):
    """Loss and slope at a step length."""

    length: float
    loss: float
    slope: float


def line_search(line: Line, condition: Condition, first: float, patience: int = PATIENCE) -> float | None:
    """Return the loss at a step that meets the condition, or None. The last call of `line.at` was there."""
    low, high, length = Point(0.0, line.loss, line.slope), None, first
    lowest, idle = line.loss, 0
    for evaluation in range(1, MAX_EVALUATIONS + 1):
        last = evaluation == MAX_EVALUATIONS or idle + 1 >= patience
        if last and low.length > 0:
            length = low.length  # falls enough, and there is no time for more
        point = Point(length, *line.at(length))
        lowest, idle = (point.loss, 0) if point.loss < lowest else (lowest, idle + 1)
        if not _is_sufficient(line, point):
            high = point
        elif condition.curvature and not last and point.slope < CURVATURE * line.slope:
            low = point
        elif condition.strong and not last and point.slope > -CURVATURE * line.slope:
            high = point
        else:
            return point.loss
        if last:
            break
        length = _next_length(low, high)
    return None


def _is_sufficient(line: Line, point: Point) -> bool:
    """Return True if the loss falls enough and is finite, with a finite slope.

    If the predicted decrease is lost in rounding, the loss must still be lower.
    """
    bound = line.loss + SUFFICIENT * point.length * line.slope
    return math.isfinite(point.slope) and point.loss <= bound and point.loss < line.loss


def _next_length(low: Point, high: Point | None) -> float:
    if high is None:
        return low.length * EXPAND
    width = high.length - low.length
    share = cubic_minimum(low, high) / width
    if not math.isfinite(share):
        share = 0.5
    return low.length + width * min(max(share, MARGIN), 1.0 - MARGIN)


def cubic_minimum(low: Point, high: Point) -> float:
    """Return the distance from `low` to the minimum of the cubic through both points; NaN if it has none."""
    width = high.length - low.length
    a = low.slope + high.slope - 3.0 * (high.loss - low.loss) / width
    square = a * a - low.slope * high.slope
    root = math.sqrt(square) if square >= 0 else math.nan
    steepening = high.slope - low.slope + 2.0 * root
    return width * (1.0 - (high.slope + root - a) / steepening) if steepening else math.nan
