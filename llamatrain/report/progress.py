"""What stands below the lines of a run on a terminal: the loss so far, how far it is, and the memory that it takes.

All of it is drawn anew a few times a second, in the width that the terminal has then, by a thread of its own: it only reads.
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
from llamatrain.report.format import Pace, amount, duration
from llamatrain.report.layout import GAP, Segment, assembled, fitted, width_of
from llamatrain.report.records import Score, StepLine
from llamatrain.report.terminal_plot import FINE, Glyphs

BAR, TRAIL = 32, 24  # signs
KEPT = 1024  # losses: of a longer run neighbours are taken together
RECENT = 32  # steps whose tokens a second are looked at
HEIGHT = 12  # lines of a terminal, from which on there is room for more than one
HEIGHTS = "▁▂▃▄▅▆▇█"


class LossTrail:
    """The losses of a run, however long it is: each a mean of as many steps."""

    def __init__(self) -> None:
        self._means, self._rest = list[float](), list[float]()
        self._each, self.lowest = 1, math.inf

    def add(self, loss: float) -> None:
        self.lowest = min(self.lowest, loss)
        self._rest.append(loss)
        if len(self._rest) < self._each:
            return
        self._means.append(sum(self._rest) / self._each)
        self._rest.clear()
        if len(self._means) == KEPT:
            self._means = np.reshape(self._means, (-1, 2)).mean(1).tolist()
            self._each *= 2

    def drawn(self, width: int) -> str:
        """As a row of bars; nothing where there are fewer than two."""
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
    """What is known of a run while it goes on."""

    iters: int
    begun: float
    done: int = 0
    last: StepLine | None = None
    scored: Score | None = None
    lowest: float = math.inf  # of its validations
    doing: str = ""
    saved: str = ""
    planned: int = 0  # bytes that it is to take at most; 0: that is not known
    pace: Pace = field(default_factory=Pace)
    trail: LossTrail = field(default_factory=LossTrail)
    speeds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def step(self, line: StepLine, now: float) -> None:
        self.speeds.append(line.tokens_per_second)
        self.pace.mark(now, line.step)
        if line.loss is not None:
            self.trail.add(line.loss)
        self.done, self.last, self.doing = line.step, line, ""

    @property
    def speed(self) -> float:
        return median(self.speeds)


@dataclass(frozen=True)
class Display:
    progress: Progress
    signs: Glyphs
    held: Callable[[], int] = resident_bytes  # bytes that the process has

    def lines(self, now: float, width: int, height: int) -> list[Text]:
        progress = self.progress
        last, alone = progress.last, height < HEIGHT or progress.last is None
        bars = [(progress.done, progress.iters, fitted([*self._progress(now, alone)], width))]
        if not alone and progress.planned:
            bars.append(
                (held := self.held(), progress.planned, fitted([memory_of(held, progress.planned)], width))
            )
        room = min(BAR, width - len(GAP) - max(width_of(pieces) for _, _, pieces in bars))
        drawn = [self._bar(room, part, whole).append_text(assembled(pieces)) for part, whole, pieces in bars]
        return drawn if alone or last is None else [self._loss(last, width), *drawn]

    def _loss(self, last: StepLine, width: int) -> Text:
        progress = self.progress
        trail = progress.trail.drawn(min(TRAIL, width // 3)) if self.signs is FINE else ""
        scored = progress.scored
        pieces = [
            *([Segment("", trail, 5, "cyan")] if trail else []),
            Segment("loss", amount(last.loss), 10, "bold cyan"),
            Segment("lowest", amount(progress.trail.lowest), 3),
            *([Segment("val", amount(scored.loss), 8, "yellow")] if scored else []),
            *([Segment("", "best", 2)] if scored and scored.loss <= progress.lowest else []),
            Segment("lr", f"{last.lr:.2e}", 1),
        ]
        return assembled(fitted(pieces, width))

    def _progress(self, now: float, alone: bool) -> Iterator[Segment]:
        """How far it is; `alone` says the loss, too."""
        progress = self.progress
        yield Segment("", f"{progress.done}/{progress.iters}", 10)
        if progress.last and alone:
            yield Segment("loss", amount(progress.last.loss), 8)
        if progress.last:
            yield Segment("", f"{progress.speed:,.0f} tok/s", 5)
        yield Segment("", duration(now - progress.begun), 7)
        if (left := progress.pace.left(now, progress.iters)) is not None:
            yield Segment("", f"{duration(left)} left", 9)
        if told := progress.doing or progress.saved:
            yield Segment("", told, 3, "green")

    def _bar(self, width: int, part: int, whole: int) -> Text:
        if width < 6:
            return Text(no_wrap=True)
        done, to_do = "━─" if self.signs is FINE else "#-"
        full = min(width, width * part // max(whole, 1))
        return Text(done * full, "cyan", no_wrap=True).append(to_do * (width - full) + GAP, "bright_black")


def memory_of(held: int, planned: int) -> Segment:
    return Segment("memory", f"{Size(held).text} of {Size(planned).text} planned", 10)
