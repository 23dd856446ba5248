"""Turns the lines of metrics.jsonl into what plots show: points, smoothed lines, axes."""

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any, Self

import numpy as np

MAX_POINTS = 1 << 15  # points of a series in memory
BLOCK = 1 << 12  # points read before extremes are picked
BINS = 500  # bins of steps, each with its lowest and highest value


class Points:
    """Steps and values in bounded memory, for a run of any length.

    Beyond MAX_POINTS only the lowest and the highest of each group of points are kept, and groups double in
    size.
    """

    def __init__(self) -> None:
        self._kept, self._new, self._group = (array("d"), array("d")), (array("d"), array("d")), 2

    def add(self, step: float, value: float) -> None:
        """Add a point."""
        for column, number in zip(self._new, (step, value), strict=True):
            column.append(number)
        if len(self._new[0]) < max(self._group, BLOCK):
            return
        steps, values = self._new if self._group == 2 else pick_extremes(*self._new, self._group)
        self._kept[0].extend(steps)
        self._kept[1].extend(values)
        self._new = array("d"), array("d")
        if len(self._kept[0]) >= MAX_POINTS:
            self._kept, self._group = pick_extremes(*self._kept, 4), 2 * self._group

    @property
    def columns(self) -> "tuple[array[float], array[float]]":
        """The steps, and the values."""
        return self._kept[0] + self._new[0], self._kept[1] + self._new[1]


def pick_extremes(
    steps: "array[float]", values: "array[float]", count: int
) -> "tuple[array[float], array[float]]":
    """Return the lowest and highest finite point of each group of `count`, and the first point."""
    x, y = np.array(steps), np.array(values)
    finite = np.flatnonzero(np.isfinite(y))
    rows = finite[: len(finite) // count * count].reshape(-1, count)
    indices = np.arange(len(rows))
    ends = [rows[indices, pick(y[rows], 1)] for pick in (np.argmin, np.argmax)] if len(rows) else []
    selected = np.unique(np.concatenate([finite[:1], *ends, finite[rows.size :]]))
    return array("d", x[selected]), array("d", y[selected])


@dataclass(frozen=True)
class Series:
    """Finite values by increasing step."""

    steps: np.ndarray
    values: np.ndarray

    @classmethod
    def from_points(cls, steps: Sequence[float], values: Sequence[float]) -> Self:
        """Return a series; of several points at a step the last one counts."""
        x, y = np.array(steps[::-1]), np.array(values[::-1])
        x, first = np.unique(x, return_index=True)
        y = y[first]
        finite = np.isfinite(x) & np.isfinite(y)
        return cls(x[finite], y[finite])

    def __len__(self) -> int:
        return len(self.steps)

    def smooth(self, low: float, high: float) -> Self:
        """Return the series smoothed, with values clipped to these bounds."""
        return type(self)(self.steps, moving_average(np.clip(self.values, low, high), len(self) // 40))

    def thin(self) -> Self:
        """Return at most two points per bin: the lowest and the highest."""
        if len(self) <= 2 * BINS:
            return self
        edges = np.linspace(0, len(self), BINS + 1).astype(int)
        bins = [self.values[begin:end] for begin, end in pairwise(edges)]
        ends = [
            begin + np.array([part.argmin(), part.argmax()]) for begin, part in zip(edges, bins, strict=False)
        ]
        selected = np.unique(np.concatenate([[0], *ends, [len(self) - 1]]))
        return type(self)(self.steps[selected], self.values[selected])


def is_drawn(name: str, line: Mapping[str, Any]) -> bool:
    """Return True if a line has a value to draw. A validation loss that is minus a reward is not drawn as a loss."""
    return name in line and not (name.startswith("val_loss") and "val_reward" in line)


@dataclass(frozen=True)
class Losses:
    """Training and validation losses, with the bounds of a plot."""

    training: Series
    validation: Series
    smooth: Series  # of the training losses
    retained: Series  # losses of data that should not be forgotten
    low: float
    high: float

    @classmethod
    def from_lines(cls, lines: Iterable[Mapping[str, Any]]) -> Self:
        """Read the losses from lines of metrics."""
        points_by_name = {"loss": Points(), "val_loss": Points(), "retain_loss": Points()}
        for line in lines:
            for name, points in points_by_name.items():
                if is_drawn(name, line):
                    points.add(to_number(line["step"], 1e15), to_number(line[name], 1e300))
        return cls.from_series(*(Series.from_points(*column.columns) for column in points_by_name.values()))

    @classmethod
    def from_series(cls, training: Series, validation: Series, retained: Series) -> Self:
        """Smooth the training losses and find the bounds."""
        low, high = axis_bounds(np.concatenate([training.values, validation.values, retained.values]))
        return cls(training, validation, training.smooth(low, high), retained, low, high)

    @property
    def best(self) -> Series:
        """The first validation with the lowest loss."""
        lowest = self.validation.values.argmin() if len(self.validation) else 0
        return Series(self.validation.steps[lowest:][:1], self.validation.values[lowest:][:1])

    @property
    def step_range(self) -> tuple[float, float]:
        """The first and the last step."""
        every = np.concatenate([self.training.steps, self.validation.steps, self.retained.steps])
        if not len(every):
            return 0.0, 1.0
        first, last = every.min(), every.max()
        return (first, last) if first < last else (first - 1, last + 1)


def to_number(value: Any, limit: float) -> float:
    """Return a number from a file; NaN if it is none, or too large to be drawn."""
    return float(value) if type(value) in (int, float) and abs(value) < limit else math.nan


def axis_bounds(values: np.ndarray) -> tuple[float, float]:
    """Return the range of an axis; a few losses far above all others (the first one, a spike) are left out."""
    if not len(values):
        return 0.0, 1.0
    ordered = np.sort(values)
    low, high = ordered[0], ordered[-1]
    most = ordered[: -max(1, len(ordered) // 50)]
    if len(most) > 3 and high - most[-1] > 4 * (most[-1] - low) > 0:
        high = most[-1]
    margin = 0.04 * (high - low) or 0.05 * abs(low) or 0.5
    return float(max(low - margin, 0.0) if low >= 0 else low - margin), float(high + margin)


def moving_average(values: np.ndarray, half: int) -> np.ndarray:
    """Return the moving average over `half` neighbors on both sides, applied twice.

    It uses fewer neighbors at the beginning, so that a steep fall stays visible.
    """
    at = np.arange(len(values))
    reach = np.minimum(half, at + half // 8)
    begin, end = np.maximum(at - reach, 0), np.minimum(at + reach + 1, len(values))
    for _ in range(2):
        sums = np.concatenate([[0.0], np.cumsum(values)])
        values = (sums[end] - sums[begin]) / (end - begin)
    return values


def ticks(low: float, high: float, count: int, whole: bool = False) -> list[tuple[float, str]]:
    """Return round positions between two values, at most about `count`, with their labels."""
    rough = (high - low) / max(count, 1)
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= rough * 0.999)
    step = max(step, 1.0) if whole else step
    places = [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    wide = digits > 4 or max(abs(low), abs(high)) >= 1e7
    return [(place, f"{place:.3g}" if wide else f"{place:,.{digits}f}") for place in places]


# ---- all numbers of a run ---------------------------------------------------

STEP_KEYS = (
    "loss",
    "lr",
    "grad_norm",
    "tokens_per_second",
    "margin",
    "reward",
    "answer_tokens",
    "kl",
    "clipped",
)
SCORE_KEYS = ("val_reward", "val_loss", "val_loss_error", "val_accuracy", "retain_loss", "retain_loss_error")
RECENT = 50  # steps that determine the speed


@dataclass
class RunSeries:
    """The numbers of a run that plots show, in a few megabytes for a run of any length."""

    points: dict[str, Points] = field(default_factory=dict)  # by name
    last: Mapping[str, Any] = field(default_factory=dict)  # step
    scored: Mapping[str, Any] = field(default_factory=dict)  # the last validation
    seconds: float | None = None  # per step, recently

    @classmethod
    def from_lines(cls, lines: Iterable[Mapping[str, Any]]) -> "RunSeries":
        """Read the numbers from lines of metrics."""
        result = cls({name: Points() for name in (*STEP_KEYS, *SCORE_KEYS)})
        recent = list[float]()
        for line in lines:
            is_step = "loss" in line
            if is_step:
                result.last = line
                recent.append(to_number(line.get("seconds"), 1e12))
                if len(recent) > 2 * RECENT:
                    del recent[:RECENT]
            elif "val_loss" in line:
                result.scored = line
            step = to_number(line["step"], 1e15)
            for name in STEP_KEYS if is_step else SCORE_KEYS:
                if is_drawn(name, line):
                    result.points[name].add(step, to_number(line[name], 1e300))
        times = [time for time in recent[-RECENT:] if math.isfinite(time)]
        result.seconds = fmean(times) if times else None
        return result

    def series(self, name: str) -> Series:
        """Return the series with this name."""
        return Series.from_points(*self.points[name].columns)

    @property
    def losses(self) -> Losses:
        """The losses."""
        return Losses.from_series(*map(self.series, ("loss", "val_loss", "retain_loss")))

    @property
    def step(self) -> int:
        """The last step."""
        return max(int(self.last.get("step", 0)), int(self.scored.get("step", 0)))

    def last_value(self, name: str) -> float | None:
        """Return a number of the last step, or None."""
        value = to_number(self.last.get(name), 1e300)
        return value if math.isfinite(value) else None
