"""What is said on standard error of work that takes a while: lines and bars, and nothing at all until they are asked for."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from llamatrain.machine.printable import printable

PATIENCE = 1.5  # seconds
_asked = list[None]()  # by how many that are at work


@contextmanager
def shown() -> Iterator[None]:
    """While this is open there is somebody to be told."""
    _asked.append(None)
    try:
        yield
    finally:
        _asked.pop()


def is_shown() -> bool:
    return bool(_asked)


def say(line: str) -> None:
    """A line on its own; where nobody can read it any more, what is at work goes on."""
    if _asked and (stream := sys.stderr):
        with suppress(OSError):  # what others put in its place may have no encoding
            print(printable(line, getattr(stream, "encoding", None) or "utf-8"), file=stream, flush=True)


@contextmanager
def told_if_long(line: str) -> Iterator[None]:
    """Says so where what is done here takes longer than anybody would wait without a word."""
    timer = threading.Timer(PATIENCE, say, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def bar(title: str, **settings: Any) -> Any:
    """A bar of tqdm's on a terminal, where it takes a while."""
    from tqdm import tqdm

    return tqdm(desc=title, leave=False, disable=None if _asked else True, delay=0.5, **settings)
