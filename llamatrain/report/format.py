"""Formats the numbers of a run for people, estimates the remaining time, and escapes text for HTML and SVG."""

import math
from collections import deque
from html import escape

from llamatrain.platform.escape import make_printable

LINES = 150  # the most lines that a run prints by default
RECENT = 300.0  # seconds of the recent past that determine the pace


def format_loss(loss: float) -> str:
    """Format a loss, with four decimals unless it is very large or small."""
    size = abs(loss)
    return f"{loss:.4f}" if 0.01 <= size < 10_000 or not size else f"{loss:.2e}"


def format_perplexity(loss: float) -> str:
    """Format the perplexity of a loss."""
    value = math.exp(loss) if loss < 700 else math.inf if loss >= 700 else math.nan
    return f"{value:,.2f}" if value < 1000 else f"{value:,.0f}" if value < 1e9 else f"{value:.2e}"


def format_step_time(seconds: float) -> str:
    """Format the time of a step in ms, s or longer units."""
    return (
        f"{1000 * seconds:.3g} ms"
        if seconds < 0.9995
        else f"{seconds:.3g} s"
        if seconds < 999.5
        else format_duration(seconds)
    )


def format_duration(seconds: float) -> str:
    """Format seconds as minutes, hours and days."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{minutes:02}:{rest:02}" if days or hours else f"{minutes}:{rest:02}"
    return f"{days}d {clock}" if days else clock


def line_interval(iters: int) -> int:
    """Return the smallest of 1, 2, 5, 10, 20 ... steps per line that prints few enough lines."""
    size = 1
    while True:
        for factor in (1, 2, 5):
            if iters // (factor * size) <= LINES:
                return factor * size
        size *= 10


class Pace:
    """The present time per step: over the later half of this process's steps, or the last five minutes of them.

    Time between two steps, such as saving and validation, counts; time before the first, such as compilation,
    does not.
    """

    def __init__(self) -> None:
        self._marks = deque[tuple[float, int]]()
        self._first = (math.nan, 0)
        self._last = (0.0, 0)
        self._due = -math.inf

    def mark(self, now: float, step: int) -> None:
        """Record a completed step."""
        self._last = (now, step)
        if now < self._due:
            return
        if not self._marks:
            self._first = self._last
        self._marks.append(self._last)
        begun, first = self._first
        self._due = now + min(0.02 * (now - begun), 5.0)
        while len(self._marks) > 2 and (
            now - self._marks[1][0] >= RECENT or 2 * (step - self._marks[1][1]) >= step - first
        ):
            self._marks.popleft()

    def seconds_left(self, now: float, steps: int) -> float | None:
        """Return the seconds until a step is reached, or None if unknown."""
        if not self._marks:
            return None
        (start, first), (end, last) = self._marks[0], self._last
        if last == first:
            return None
        return max(0.0, (steps - last) * (end - start) / (last - first) - (now - end))


# ---- text from files and users ---------------------------------------------


def escape_markup(text: object, lines: bool = False) -> str:
    """Escape text for HTML or SVG, without characters that XML forbids; `lines` keeps newlines and tabs."""
    return escape(make_printable(str(text), "utf-8", keep="\n\t" if lines else ""))
