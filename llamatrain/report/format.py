"""Numbers of a training run as people read them, and how long the rest will take."""

import math
from collections import deque
from html import escape

from llamatrain.platform.escape import make_printable

LINES = 150  # that a run prints, at most, unless told how many
RECENT = 300.0  # seconds, at most, that tell how fast it goes


def format_loss(loss: float) -> str:
    size = abs(loss)
    return f"{loss:.4f}" if 0.01 <= size < 10_000 or not size else f"{loss:.2e}"


def format_perplexity(loss: float) -> str:
    value = math.exp(loss) if loss < 700 else math.inf if loss >= 700 else math.nan
    return f"{value:,.2f}" if value < 1000 else f"{value:,.0f}" if value < 1e9 else f"{value:.2e}"


def format_step_time(seconds: float) -> str:
    """Of one step."""
    return (
        f"{1000 * seconds:.3g} ms"
        if seconds < 0.9995
        else f"{seconds:.3g} s"
        if seconds < 999.5
        else format_duration(seconds)
    )


def format_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{minutes:02}:{rest:02}" if days or hours else f"{minutes}:{rest:02}"
    return f"{days}d {clock}" if days else clock


def line_interval(iters: int) -> int:
    """The smallest of 1, 2, 5, 10, 20 ... that gives few enough lines."""
    size = 1
    while True:
        for factor in (1, 2, 5):
            if iters // (factor * size) <= LINES:
                return factor * size
        size *= 10


class Pace:
    """How long a step takes of late: over the later half of the steps done here, or the last five minutes of them.

    What lies between two steps, such as saving and validation, counts with them; what lies before the first, such as
    compiling, does not.
    """

    def __init__(self) -> None:
        self._marks = deque[tuple[float, int]]()
        self._first = (math.nan, 0)
        self._last = (0.0, 0)
        self._due = -math.inf

    def mark(self, now: float, step: int) -> None:
        """A step was done."""
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
        """Seconds until a step is reached, if that can be said."""
        if not self._marks:
            return None
        (start, first), (end, last) = self._marks[0], self._last
        if last == first:
            return None
        return max(0.0, (steps - last) * (end - start) / (last - first) - (now - end))


# ---- text from files and users ---------------------------------------------


def escape_markup(text: object, lines: bool = False) -> str:
    """Escaped, and without signs that XML forbids; `lines` and tabs stay where they are asked for."""
    return escape(make_printable(str(text), "utf-8", keep="\n\t" if lines else ""))
