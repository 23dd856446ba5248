"""The figures of a run, read once from the lines of metrics.jsonl: a few megabytes for a run of any length."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from llamatrain.report.loss_series import Losses, Points, Series, number

TRAINED = ("loss", "lr", "grad_norm", "tokens_per_second", "margin")
JUDGED = ("val_loss", "val_loss_error", "val_accuracy")
RECENT = 50  # steps that tell how fast it goes


@dataclass
class RunSeries:
    points: dict[str, Points] = field(default_factory=dict)  # by name
    last: Mapping[str, Any] = field(default_factory=dict)  # step
    scored: Mapping[str, Any] = field(default_factory=dict)  # the last validation
    seconds: float | None = None  # of a step, of late

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]]) -> "RunSeries":
        found = cls({name: Points() for name in (*TRAINED, *JUDGED)})
        recent = list[float]()
        for line in lines:
            trained = "loss" in line
            if trained:
                found.last = line
                recent.append(number(line.get("seconds"), 1e12))
                if len(recent) > 2 * RECENT:
                    del recent[:RECENT]
            elif "val_loss" in line:
                found.scored = line
            step = number(line["step"], 1e15)
            for name in TRAINED if trained else JUDGED:
                if name in line:
                    found.points[name].add(step, number(line[name], 1e300))
        known = [each for each in recent[-RECENT:] if math.isfinite(each)]
        found.seconds = fmean(known) if known else None
        return found

    def series(self, name: str) -> Series:
        return Series.of(*self.points[name].columns)

    @property
    def losses(self) -> Losses:
        return Losses.between(self.series("loss"), self.series("val_loss"))

    @property
    def step(self) -> int:
        """The last of all."""
        return max(int(self.last.get("step", 0)), int(self.scored.get("step", 0)))

    def told(self, name: str) -> float | None:
        """A number of the last step, if it is one."""
        value = number(self.last.get(name), 1e300)
        return value if math.isfinite(value) else None
