"""What is said on standard error of work that takes a while: lines and bars, and nothing at all until they are asked for."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from llamatrain.machine.launching import launch
from llamatrain.machine.printable import printable

PATIENCE = 1.5  # seconds
SHOW_CURSOR = "\x1b[?25h"  # a display that is left at once may have hidden it
CLEAR_LINE = "\r\x1b[K"
_asked = list[None]()  # by how many that are at work
_displays = list[Callable[[str], None]]()  # that stand on the terminal


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
        with suppress(OSError):
            print(printable(line, _encoding(stream)), file=stream, flush=True)


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


class Counted:
    """In the place of a bar, where a display stands already."""

    def __init__(self, title: str, total: int, tell: Callable[[str], None]) -> None:
        self.title, self.total, self.tell, self.done = title, total, tell, 0

    def __enter__(self) -> "Counted":
        self.update(0)
        return self

    def update(self, count: int = 1) -> None:
        self.done += count
        self.tell(f"{self.title}: {self.done} of {self.total}")

    def __exit__(self, *how: object) -> None:
        self.tell("")


def bar(title: str, **settings: Any) -> Any:
    """A bar of tqdm's on a terminal, where it takes a while."""
    if _displays:
        return Counted(title, settings["total"], _displays[-1])
    from tqdm import tqdm

    return tqdm(
        desc=printable(title, _encoding(sys.stderr)), leave=False, disable=None if _asked else True, delay=0.5, **settings
    )


def _encoding(stream: Any) -> str:
    """What others put in the place of standard error may have none."""
    return getattr(stream, "encoding", None) or "utf-8"


def tidied() -> None:
    """A terminal that is left at once: no bar stays on it, and its cursor shows."""
    if sys.stderr.isatty():
        bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
        os.write(sys.stderr.fileno(), (SHOW_CURSOR + CLEAR_LINE * bool(getattr(bars, "_instances", ()))).encode())


def unread() -> None:
    """Nobody reads standard output any more: what is still to be flushed goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
