"""The progress display below the lines of a run: loss so far, progress, memory.

A thread draws it a few times a second in the present width of the terminal; it only reads.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from rich.text import Text

from llamatrain.config.units import Size
from llamatrain.platform.memory import resident_bytes
from llamatrain.report.format import Pace, format_duration, format_loss
from llamatrain.report.layout import GAP, Segment, fit_segments, join_segments, total_width
from llamatrain.report.records import Score, StepLine
from llamatrain.report.terminal_plot import UNICODE, Glyphs

BAR, TRAIL = 32, 24  # characters
MAX_LOSSES = 1024  # of a longer run, neighbors are averaged
RECENT = 32  # steps that determine the speed
HEIGHT = 12  # lines of a terminal that has room for several display lines
HEIGHTS = "▁▂▃▄▅▆▇█"


class LossTrail:
    """The losses of a run of any length, each a mean over the same number of steps."""

    def __init__(self) -> None:
        self._means, self._rest = list[float](), list[float]()
        self._group, self.lowest = 1, math.inf

    def add(self, loss: float) -> None:
        """Add the loss of a step."""
        self.lowest = min(self.lowest, loss)
        self._rest.append(loss)
        if len(self._rest) < self._group:
            return
        self._means.append(sum(self._rest) / self._group)
        self._rest.clear()
        if len(self._means) == MAX_LOSSES:
            self._means = np.reshape(self._means, (-1, 2)).mean(1).tolist()
            self._group *= 2

    def draw(self, width: int) -> str:
        """Return a row of bars, or nothing with fewer than two losses."""
        values = np.array(self._means)
        values = values[np.isfinite(values)]
        if len(values) < 2 or width < 2:
            return ""
        columns = np.array([part.mean() for part in np.array_split(values, min(width, len(values)))])
        low, high = columns.min(), np.quantile(columns, 0.95) if len(columns) > 8 else columns.max()
        steps = (len(HEIGHTS) - 1) * (np.clip(columns, low, high) - low) / (high - low or 1.0)
        return "".join(HEIGHTS[round(step)] for step in steps)


@dataclass(kw_only=True)
class Progress:
    """The present state of a run."""

    iters: int
    start: float
    steps_done: int = 0
    last: StepLine | None = None
    score: Score | None = None
    retained: Score | None = None  # of data that should not be forgotten
    lowest: float = math.inf  # of the validations
    activity: str = ""
    last_save: str = ""
    planned_bytes: int = 0  # 0: unknown
    pace: Pace = field(default_factory=Pace)
    trail: LossTrail = field(default_factory=LossTrail)
    speeds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def step(self, line: StepLine, now: float) -> None:
        """Record a step."""
        self.speeds.append(line.tokens_per_second)
        self.pace.mark(now, line.step)
        if line.loss is not None:
            self.trail.add(line.loss)
        self.steps_done, self.last, self.activity = line.step, line, ""

    @property
    def speed(self) -> float:
        """The median tokens per second of recent steps."""
        return median(self.speeds)


@dataclass(frozen=True)
class Display:
    """Draws the progress of a run."""

    progress: Progress
    glyphs: Glyphs
    used_bytes: Callable[[], int] = resident_bytes  # of the process

    def lines(self, now: float, width: int, height: int) -> list[Text]:
        """Return the lines of the display."""
        progress = self.progress
        last, single_line = progress.last, height < HEIGHT or progress.last is None
        bars = [
            (progress.steps_done, progress.iters, fit_segments([*self._progress(now, single_line)], width))
        ]
        if not single_line and progress.planned_bytes:
            bars.append(
                (
                    used := self.used_bytes(),
                    progress.planned_bytes,
                    fit_segments([memory_segment(used, progress.planned_bytes)], width),
                )
            )
        room = min(BAR, width - len(GAP) - max(total_width(pieces) for _, _, pieces in bars))
        rows = [
            self._bar(room, part, whole).append_text(join_segments(pieces)) for part, whole, pieces in bars
        ]
        return rows if single_line or last is None else [self._loss(last, width), *rows]

    def _loss(self, last: StepLine, width: int) -> Text:
        progress = self.progress
        trail = progress.trail.draw(min(TRAIL, width // 3)) if self.glyphs is UNICODE else ""
        score = progress.score
        pieces = [
            *([Segment("", trail, 5, "cyan")] if trail else []),
            Segment("loss", format_loss(last.loss), 10, "bold cyan"),
            Segment("lowest", format_loss(progress.trail.lowest), 3),
            *([Segment("val", format_loss(score.loss), 8, "yellow")] if score else []),
            *([Segment("retained", format_loss(progress.retained.loss), 4)] if progress.retained else []),
            *([Segment("", "best", 2)] if score and score.loss <= progress.lowest else []),
            Segment("lr", f"{last.lr:.2e}", 1),
        ]
        return join_segments(fit_segments(pieces, width))

    def _progress(self, now: float, single_line: bool) -> Iterator[Segment]:
        """Yield the segments of the progress line; a single line shows the loss as well."""
        progress = self.progress
        yield Segment("", f"{progress.steps_done}/{progress.iters}", 10)
        if progress.last and single_line:
            yield Segment("loss", format_loss(progress.last.loss), 8)
        if progress.last:
            yield Segment("", f"{progress.speed:,.0f} tok/s", 5)
        yield Segment("", format_duration(now - progress.start), 7)
        if (left := progress.pace.seconds_left(now, progress.iters)) is not None:
            yield Segment("", f"{format_duration(left)} left", 9)
        if activity := progress.activity or progress.last_save:
            yield Segment("", activity, 3, "green")

    def _bar(self, width: int, part: int, whole: int) -> Text:
        if width < 6:
            return Text(no_wrap=True)
        done, to_do = "━─" if self.glyphs is UNICODE else "#-"
        full = min(width, width * part // max(whole, 1))
        return Text(done * full, "cyan", no_wrap=True).append(to_do * (width - full) + GAP, "bright_black")


def memory_segment(used: int, planned: int) -> Segment:
    """Return used and planned memory as a segment."""
    return Segment("memory", f"{Size(used).text} of {Size(planned).text} planned", 10)
