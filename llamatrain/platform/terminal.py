"""What is said on standard error of work that takes a while: lines and bars, and nothing at all until they are asked for."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from llamatrain.platform.escape import make_printable
from llamatrain.platform.threads import start_thread

SLOW_AFTER = 1.5  # seconds
BAR_DELAY = 0.5  # seconds before a bar is drawn
LINE_INTERVAL = 15.0  # seconds between two lines of work that goes on
SHOW_CURSOR = "\x1b[?25h"  # a display that is left at once may have hidden it
CLEAR_LINE = "\r\x1b[K"
_listeners = list[None]()  # by how many that are at work
_text_sinks = list[Callable[[str], None]]()  # that stand on the terminal
_bars = list["Bar"]()  # that are open


@contextmanager
def show_log() -> Iterator[None]:
    """While this is open there is somebody to be told."""
    _listeners.append(None)
    try:
        yield
    finally:
        _listeners.pop()


@contextmanager
def quiet(enabled: bool = True) -> Iterator[None]:
    """While this is open nobody is told anything, but of what fails."""
    before = _listeners[:]
    if enabled:
        _listeners.clear()
    try:
        yield
    finally:
        _listeners[:] = before


def is_verbose() -> bool:
    return bool(_listeners)


def log_line(line: str) -> None:
    """A line on its own; where nobody can read it any more, what is at work goes on."""
    if _listeners and (stream := sys.stderr):
        with suppress(OSError), _hide_bars(stream):
            print(wrap_line(make_printable(line, _get_encoding(stream)), stream), file=stream, flush=True)


def wrap_line(line: str, stream: Any) -> str:
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
def call_if_slow(seconds: float, callback: Callable[[], None]) -> Iterator[None]:
    """It is done once, beside what takes longer than that here."""
    timer = threading.Timer(seconds, callback)
    timer.daemon = True
    start_thread(timer)
    try:
        yield
    finally:
        timer.cancel()


def log_if_slow(line: str) -> AbstractContextManager[None]:
    """Says so where what is done takes longer than anybody would wait without a word."""
    return call_if_slow(SLOW_AFTER, lambda: log_line(line))


@contextmanager
def progress_area(set_text: Callable[[str], None]) -> Iterator[None]:
    """While this is open a display stands on the terminal, which has a place for what is at work."""
    _text_sinks.append(set_text)
    try:
        yield
    finally:
        _text_sinks.pop()


class CountedProgress:
    """Counts in the display or bar that is on the terminal already: two of them would overdraw each other."""

    def __init__(self, title: str, total: int | None, set_text: Callable[[str], None]) -> None:
        self.title, self.total, self.set_text, self.n = title, total, set_text, 0

    def __enter__(self) -> "CountedProgress":
        self.update(0)
        return self

    def update(self, count: int = 1) -> None:
        self.n += count
        self.set_text(f"{self.title}: {self.n}" + (f" of {self.total}" if self.total is not None else ""))

    def __exit__(self, *how: object) -> None:
        self.set_text("")


class LoggedBar:
    """In the place of a bar, where the output goes to a file: a line every so often."""

    def __init__(
        self, title: str, total: int | None = None, unit: str = "", unit_scale: bool = False
    ) -> None:
        self.title, self.total, self.is_scaled, self.unit, self.n = title, total, unit_scale, unit, 0
        self._start = self._next_line = time.monotonic()

    def __enter__(self) -> "LoggedBar":
        self._next_line += LINE_INTERVAL
        return self

    def update(self, count: int = 1) -> None:
        self.n += count
        if (now := time.monotonic()) < self._next_line:
            return
        self._next_line = now + LINE_INTERVAL
        whole = f" of {self._format_count(self.total)}" if self.total else ""
        log_line(f"{self.title}: {self._format_count(self.n)}{whole}, after {now - self._start:.0f} s")

    def _format_count(self, count: int) -> str:
        return f"{count / 1e6:,.1f} M{self.unit}" if self.is_scaled else f"{count:,}"

    def __exit__(self, *how: object) -> None: ...


class Bar:
    """Draws a bar of tqdm's on a terminal once it takes a while."""

    def __init__(self, title: str, **settings: Any) -> None:
        self.title, self.settings = make_printable(title, _get_encoding(sys.stderr)), settings
        self.n = 0

    def __enter__(self) -> "Bar":
        from tqdm import tqdm

        off = None if _listeners else True
        self._bar = tqdm(desc=self.title, leave=False, disable=off, delay=BAR_DELAY, **self.settings)
        self._start = time.monotonic()
        if self.is_enabled:
            _text_sinks.append(self._set_text)
            _bars.append(self)
        return self

    def update(self, count: int = 1) -> None:
        self.n += count
        self._bar.update(count)

    def _set_text(self, text: str) -> None:
        """Show what is counted meanwhile in the place of the title."""
        self._bar.set_description_str(text or self.title, refresh=False)
        self.draw()

    def draw(self) -> None:
        if time.monotonic() - self._start > BAR_DELAY:
            self._bar.refresh()
            self._bar.last_print_t = time.time()  # else what was drawn so early would stay when it is closed

    def __exit__(self, *how: object) -> None:
        if self.is_enabled:
            _bars.remove(self)
            _text_sinks.remove(self._set_text)
        self._bar.close()

    @property
    def is_enabled(self) -> bool:
        return not self._bar.disable

    @property
    def is_drawn(self) -> bool:
        return bool(self._bar.last_print_t >= self._bar.start_t + BAR_DELAY)


def progress_bar(title: str, **settings: Any) -> CountedProgress | LoggedBar | Bar:
    """Show a bar on a terminal, or its count in the display that stands there; elsewhere a line every so often."""
    if _text_sinks:
        return CountedProgress(title, settings["total"], _text_sinks[-1])
    if _listeners and sys.stderr and not sys.stderr.isatty():
        return LoggedBar(title, **settings)
    return Bar(title, **settings)


@contextmanager
def _hide_bars(stream: Any) -> Iterator[None]:
    """While this is open no bar is on the terminal: a line written now stands above it."""
    drawn = [bar for bar in _bars if bar.is_drawn]
    if drawn:
        stream.write(CLEAR_LINE)
    yield
    for bar in drawn:
        bar.draw()


def _get_encoding(stream: Any) -> str:
    """What others put in the place of standard error may have none."""
    return getattr(stream, "encoding", None) or "utf-8"


def restore_terminal() -> None:
    """A terminal that is left at once: no bar stays on it, and its cursor shows."""
    if sys.stderr.isatty():
        bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
        os.write(
            sys.stderr.fileno(), (SHOW_CURSOR + CLEAR_LINE * bool(getattr(bars, "_instances", ()))).encode()
        )


def drop_stdout() -> None:
    """Nobody reads standard output any more: what is still to be flushed goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
