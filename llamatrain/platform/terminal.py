"""Lines and progress bars on standard error, silent until they are enabled."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TextIO

from llamatrain.platform.escape import make_printable
from llamatrain.platform.notebook import NotebookBar, in_notebook
from llamatrain.platform.threads import start_thread

SLOW_AFTER = 1.5  # seconds
BAR_DELAY = 0.5  # seconds before a bar is drawn
LINE_INTERVAL = 15.0  # seconds between two lines
SHOW_CURSOR = "\x1b[?25h"  # an interrupted display may have hidden it
CLEAR_LINE = "\r\x1b[K"
_listeners = list[None]()  # one entry for each open show_log
_text_sinks = list[Callable[[str], None]]()  # the displays on the terminal that can show a text
_bars = list["Bar"]()  # the open bars


@contextmanager
def show_log() -> Iterator[None]:
    """Show lines and bars during the block."""
    _listeners.append(None)
    try:
        yield
    finally:
        _listeners.pop()


@contextmanager
def quiet(enabled: bool = True) -> Iterator[None]:
    """Show only errors during the block."""
    before = _listeners[:]
    if enabled:
        _listeners.clear()
    try:
        yield
    finally:
        _listeners[:] = before


def is_verbose() -> bool:
    """Return True if lines and bars are shown."""
    return bool(_listeners)


def log_line(line: str) -> None:
    """Print a line above all bars. If nobody can read it, work continues."""
    if _listeners and (stream := sys.stderr):
        with suppress(OSError), _hide_bars(stream):
            print(wrap_line(make_printable(line, _get_encoding(stream)), stream), file=stream, flush=True)


def wrap_line(line: str, stream: Any) -> str:
    """Wrap a line at words if it is wider than the terminal."""
    with suppress(OSError, ValueError, AttributeError):  # not a terminal, or it is closed
        width = int(os.environ.get("COLUMNS") or 0) or os.get_terminal_size(stream.fileno()).columns
        if stream.isatty() and len(line) > width > 0:
            from textwrap import wrap

            return "\n".join(
                wrap(line, width, break_long_words=False, break_on_hyphens=False, replace_whitespace=False)
            )
    return line


@contextmanager
def call_if_slow(seconds: float, callback: Callable[[], None]) -> Iterator[None]:
    """Call `callback` once if the block takes longer than `seconds`."""
    timer = threading.Timer(seconds, callback)
    timer.daemon = True
    start_thread(timer)
    try:
        yield
    finally:
        timer.cancel()


def log_if_slow(line: str) -> AbstractContextManager[None]:
    """Print a line if the block takes longer than a user would wait without one."""
    return call_if_slow(SLOW_AFTER, lambda: log_line(line))


@contextmanager
def progress_area(set_text: Callable[[str], None]) -> Iterator[None]:
    """Show progress in another display during the block, through `set_text`."""
    _text_sinks.append(set_text)
    try:
        yield
    finally:
        _text_sinks.pop()


class CountedProgress:
    """Counts in the display or bar that is already on the terminal.

    Two bars would overwrite each other.
    """

    def __init__(self, title: str, total: int | None, set_text: Callable[[str], None]) -> None:
        self.title, self.total, self.set_text, self.n = title, total, set_text, 0

    def __enter__(self) -> "CountedProgress":
        self.update(0)
        return self

    def update(self, count: int = 1) -> None:
        """Count and show the total."""
        self.n += count
        self.set_text(f"{self.title}: {self.n}" + (f" of {self.total}" if self.total is not None else ""))

    def __exit__(self, *how: object) -> None:
        self.set_text("")


class LoggedBar:
    """Prints a line now and then, where output goes to a file."""

    def __init__(
        self, title: str, total: int | None = None, unit: str = "", unit_scale: bool = False
    ) -> None:
        self.title, self.total, self.is_scaled, self.unit, self.n = title, total, unit_scale, unit, 0
        self._start = self._next_line = time.monotonic()

    def __enter__(self) -> "LoggedBar":
        self._next_line += LINE_INTERVAL
        return self

    def update(self, count: int = 1) -> None:
        """Count, and print a line if it is time."""
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
    """Draws a tqdm bar on a terminal once work takes a while."""

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
        """Count and redraw."""
        self.n += count
        self._bar.update(count)

    def _set_text(self, text: str) -> None:
        """Show another counter's text in place of the title."""
        self._bar.set_description_str(text or self.title, refresh=False)
        self.draw()

    def draw(self) -> None:
        """Redraw the bar."""
        if time.monotonic() - self._start > BAR_DELAY:
            self._bar.refresh()
            self._bar.last_print_t = time.time()  # otherwise a bar drawn this early would not be cleared

    def __exit__(self, *how: object) -> None:
        if self.is_enabled:
            _bars.remove(self)
            _text_sinks.remove(self._set_text)
        self._bar.close()

    @property
    def is_enabled(self) -> bool:
        """True if the bar may be drawn."""
        return not self._bar.disable

    @property
    def is_drawn(self) -> bool:
        """True if the bar is on the terminal."""
        return bool(self._bar.last_print_t >= self._bar.start_t + BAR_DELAY)


def progress_bar(title: str, **settings: Any) -> CountedProgress | LoggedBar | NotebookBar | Bar:
    """Return a bar for a terminal or a notebook, a counter in the current display, or lines for a file."""
    if _text_sinks:
        return CountedProgress(title, settings["total"], _text_sinks[-1])
    if _listeners and in_notebook():
        return NotebookBar(title, **settings)
    if _listeners and sys.stderr and not sys.stderr.isatty():
        return LoggedBar(title, **settings)
    return Bar(title, **settings)


@contextmanager
def _hide_bars(stream: Any) -> Iterator[None]:
    """Clear drawn bars during the block, so that a line written now stands above them."""
    drawn = [bar for bar in _bars if bar.is_drawn]
    if drawn:
        stream.write(CLEAR_LINE)
    yield
    for bar in drawn:
        bar.draw()


def _get_encoding(stream: Any) -> str:
    """Return a stream's encoding; a replaced standard error may have none."""
    return getattr(stream, "encoding", None) or "utf-8"


def restore_terminal() -> None:
    """Clear bars and show the cursor before an immediate exit."""
    if sys.stderr.isatty():
        bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
        os.write(
            sys.stderr.fileno(), (SHOW_CURSOR + CLEAR_LINE * bool(getattr(bars, "_instances", ()))).encode()
        )


def discard_output(stream: TextIO) -> None:
    """Send a standard stream to the null device, because its reader has gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def flush_or_discard(stream: TextIO) -> None:
    """Flush a standard stream, so that Python does not exit with code 120 if its reader has gone."""
    try:
        stream.flush()
    except OSError:
        discard_output(stream)
