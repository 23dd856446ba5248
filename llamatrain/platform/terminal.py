"""What is said on standard error of work that takes a while: lines and bars, and nothing at all until they are asked for."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from llamatrain.platform.escape import printable
from llamatrain.platform.threads import launch

PATIENCE = 1.5  # seconds
DELAY = 0.5  # seconds before a bar is drawn
EVERY = 15.0  # seconds between two lines of work that goes on
SHOW_CURSOR = "\x1b[?25h"  # a display that is left at once may have hidden it
CLEAR_LINE = "\r\x1b[K"
_asked = list[None]()  # by how many that are at work
_displays = list[Callable[[str], None]]()  # that stand on the terminal
_bars = list["Bar"]()  # that are open


@contextmanager
def shown() -> Iterator[None]:
    """While this is open there is somebody to be told."""
    _asked.append(None)
    try:
        yield
    finally:
        _asked.pop()


@contextmanager
def hushed(whether: bool = True) -> Iterator[None]:
    """While this is open nobody is told anything, but of what fails."""
    before = _asked[:]
    if whether:
        _asked.clear()
    try:
        yield
    finally:
        _asked[:] = before


def is_shown() -> bool:
    return bool(_asked)


def say(line: str) -> None:
    """A line on its own; where nobody can read it any more, what is at work goes on."""
    if _asked and (stream := sys.stderr):
        with suppress(OSError), _above_bars(stream):
            print(folded(printable(line, _encoding(stream)), stream), file=stream, flush=True)


def folded(line: str, stream: Any) -> str:
    """Break a line between words where it is wider than the terminal, which would break it anywhere."""
    with suppress(OSError, ValueError, AttributeError):  # no terminal, or one that is no more
        width = int(os.environ.get("COLUMNS") or 0) or os.get_terminal_size(stream.fileno()).columns
        if stream.isatty() and len(line) > width > 0:
            from textwrap import wrap

            return "\n".join(
                wrap(line, width, break_long_words=False, break_on_hyphens=False, replace_whitespace=False)
            )
    return line


@contextmanager
def if_longer(seconds: float, act: Callable[[], None]) -> Iterator[None]:
    """It is done once, beside what takes longer than that here."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    launch(timer)
    try:
        yield
    finally:
        timer.cancel()


def told_if_long(line: str) -> AbstractContextManager[None]:
    """Says so where what is done takes longer than anybody would wait without a word."""
    return if_longer(PATIENCE, lambda: say(line))


@contextmanager
def displaying(tell: Callable[[str], None]) -> Iterator[None]:
    """While this is open a display stands on the terminal, which has a place for what is at work."""
    _displays.append(tell)
    try:
        yield
    finally:
        _displays.pop()


class CountedProgress:
    """Counts in the display or bar that is on the terminal already: two of them would overdraw each other."""

    def __init__(self, title: str, total: int | None, tell: Callable[[str], None]) -> None:
        self.title, self.total, self.tell, self.n = title, total, tell, 0

    def __enter__(self) -> "CountedProgress":
        self.update(0)
        return self

    def update(self, count: int = 1) -> None:
        self.n += count
        self.tell(f"{self.title}: {self.n}" + (f" of {self.total}" if self.total is not None else ""))

    def __exit__(self, *how: object) -> None:
        self.tell("")


class LoggedBar:
    """In the place of a bar, where the output goes to a file: a line every so often."""

    def __init__(
        self, title: str, total: int | None = None, unit: str = "", unit_scale: bool = False
    ) -> None:
        self.title, self.total, self.scaled, self.unit, self.n = title, total, unit_scale, unit, 0
        self._begun = self._due = time.monotonic()

    def __enter__(self) -> "LoggedBar":
        self._due += EVERY
        return self

    def update(self, count: int = 1) -> None:
        self.n += count
        if (now := time.monotonic()) < self._due:
            return
        self._due = now + EVERY
        whole = f" of {self._counted(self.total)}" if self.total else ""
        say(f"{self.title}: {self._counted(self.n)}{whole}, after {now - self._begun:.0f} s")

    def _counted(self, count: int) -> str:
        return f"{count / 1e6:,.1f} M{self.unit}" if self.scaled else f"{count:,}"

    def __exit__(self, *how: object) -> None: ...


class Bar:
    """Draws a bar of tqdm's on a terminal once it takes a while."""

    def __init__(self, title: str, **settings: Any) -> None:
        self.title, self.settings = printable(title, _encoding(sys.stderr)), settings
        self.n = 0

    def __enter__(self) -> "Bar":
        from tqdm import tqdm

        off = None if _asked else True
        self._bar = tqdm(desc=self.title, leave=False, disable=off, delay=DELAY, **self.settings)
        self._began = time.monotonic()
        if self.is_shown:
            _displays.append(self._tell)
            _bars.append(self)
        return self

    def update(self, count: int = 1) -> None:
        self.n += count
        self._bar.update(count)

    def _tell(self, text: str) -> None:
        """Show what is counted meanwhile in the place of the title."""
        self._bar.set_description_str(text or self.title, refresh=False)
        self.draw()

    def draw(self) -> None:
        if time.monotonic() - self._began > DELAY:
            self._bar.refresh()
            self._bar.last_print_t = time.time()  # else what was drawn so early would stay when it is closed

    def __exit__(self, *how: object) -> None:
        if self.is_shown:
            _bars.remove(self)
            _displays.remove(self._tell)
        self._bar.close()

    @property
    def is_shown(self) -> bool:
        return not self._bar.disable

    @property
    def is_drawn(self) -> bool:
        return bool(self._bar.last_print_t >= self._bar.start_t + DELAY)


def bar(title: str, **settings: Any) -> CountedProgress | LoggedBar | Bar:
    """Show a bar on a terminal, or its count in the display that stands there; elsewhere a line every so often."""
    if _displays:
        return CountedProgress(title, settings["total"], _displays[-1])
    if _asked and sys.stderr and not sys.stderr.isatty():
        return LoggedBar(title, **settings)
    return Bar(title, **settings)


@contextmanager
def _above_bars(stream: Any) -> Iterator[None]:
    """While this is open no bar is on the terminal: a line written now stands above it."""
    drawn = [each for each in _bars if each.is_drawn]
    if drawn:
        stream.write(CLEAR_LINE)
    yield
    for each in drawn:
        each.draw()


def _encoding(stream: Any) -> str:
    """What others put in the place of standard error may have none."""
    return getattr(stream, "encoding", None) or "utf-8"


def tidied() -> None:
    """A terminal that is left at once: no bar stays on it, and its cursor shows."""
    if sys.stderr.isatty():
        bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
        os.write(
            sys.stderr.fileno(), (SHOW_CURSOR + CLEAR_LINE * bool(getattr(bars, "_instances", ()))).encode()
        )


def unread() -> None:
    """Nobody reads standard output any more: what is still to be flushed goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
