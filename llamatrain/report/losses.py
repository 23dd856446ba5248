"""From the lines of metrics.jsonl to what a picture of them shows: points, a smooth line through them, axes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np

BINS = 500  # of the steps, where there are many: each shows its lowest and its highest loss


@dataclass(frozen=True)
class Series:
    """Losses that are finite, by steps that grow."""

    steps: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, steps: Sequence[float], values: Sequence[float]) -> Self:
        """Of a step that is there twice the last one counts."""
        x, y = np.array(steps[::-1]), np.array(values[::-1])
        x, first = np.unique(x, return_index=True)
        y = y[first]
        finite = np.isfinite(x) & np.isfinite(y)
        return cls(x[finite], y[finite])

    def __len__(self) -> int:
        return len(self.steps)

    def smoothed(self, low: float, high: float) -> Self:
        """The middle of the noise, of which what lies outside of these bounds counts as they do."""
        return type(self)(self.steps, mean_around(np.clip(self.values, low, high), len(self) // 40))

    def thinned(self) -> Self:
        """At most two points for each bin: where it is lowest, and where it is highest."""
        if len(self) <= 2 * BINS:
            return self
        edges = np.linspace(0, len(self), BINS + 1).astype(int)
        bins = [self.values[begin:end] for begin, end in pairwise(edges)]
        ends = [begin + np.array([part.argmin(), part.argmax()]) for begin, part in zip(edges, bins, strict=False)]
        kept = np.unique(np.concatenate([[0], *ends, [len(self) - 1]]))
        return type(self)(self.steps[kept], self.values[kept])


@dataclass(frozen=True)
class Losses:
    training: Series
    validation: Series
    smooth: Series  # of the training
    low: float
    high: float

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]]) -> Self:
        found: dict[str, tuple[list[float], list[float]]] = {"loss": ([], []), "val_loss": ([], [])}
        for line in lines:
            for name, (steps, values) in found.items():
                if name in line:
                    steps.append(number(line["step"], 1e15))
                    values.append(number(line[name], 1e300))
        return cls.between(*(Series.of(*points) for points in found.values()))

    @classmethod
    def between(cls, training: Series, validation: Series) -> Self:
        low, high = bounds(np.concatenate([training.values, validation.values]))
        return cls(training, validation, training.smoothed(low, high), low, high)

    @property
    def best(self) -> Series:
        """The validation of the lowest loss, the first of equals."""
        lowest = self.validation.values.argmin() if len(self.validation) else 0
        return Series(self.validation.steps[lowest:][:1], self.validation.values[lowest:][:1])

    @property
    def steps(self) -> tuple[float, float]:
        """The first and the last of all."""
        every = np.concatenate([self.training.steps, self.validation.steps])
        if not len(every):
            return 0.0, 1.0
        first, last = every.min(), every.max()
        return (first, last) if first < last else (first - 1, last + 1)


def number(value: Any, limit: float) -> float:
    """A number from a file: NaN, where it is none, or one too large to be drawn."""
    return float(value) if type(value) in (int, float) and abs(value) < limit else math.nan


def bounds(values: np.ndarray) -> tuple[float, float]:
    """What the axis goes from and to. A few losses that tower over all others (a first one, a spike) stay out."""
    if not len(values):
        return 0.0, 1.0
    ordered = np.sort(values)
    low, high = ordered[0], ordered[-1]
    most = ordered[: -max(1, len(ordered) // 50)]
    if len(most) > 3 and high - most[-1] > 4 * (most[-1] - low) > 0:
        high = most[-1]
    margin = 0.04 * (high - low) or 0.05 * abs(low) or 0.5
    return float(max(low - margin, 0.0) if low >= 0 else low - margin), float(high + margin)


def mean_around(values: np.ndarray, half: int) -> np.ndarray:
    """Twice the mean over so many neighbours on both sides: fewer where the series begins, so that a steep fall stays."""
    at = np.arange(len(values))
    reach = np.minimum(half, at + half // 8)
    begin, end = np.maximum(at - reach, 0), np.minimum(at + reach + 1, len(values))
    for _ in range(2):
        sums = np.concatenate([[0.0], np.cumsum(values)])
        values = (sums[end] - sums[begin]) / (end - begin)
    return values


def ticks(low: float, high: float, count: int, whole: bool = False) -> list[tuple[float, str]]:
    """Round places between two others, no more than about so many, and what is written there."""
    rough = (high - low) / max(count, 1)
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= rough * 0.999)
    step = max(step, 1.0) if whole else step
    places = [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    wide = digits > 4 or max(abs(low), abs(high)) >= 1e7
    return [(place, f"{place:.3g}" if wide else f"{place:,.{digits}f}") for place in places]
