"""How a program of its own ends where a signal says so: at once, with its temporary files gone and its terminal in order.

No KeyboardInterrupt comes up for that: it may come in the midst of an import, or where Python can but print and forget it.
"""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from llamatrain.platform.temp_files import remove_all
from llamatrain.platform.terminal import tidied

way_out: Callable[[int], object] = os._exit  # of one that was started together with others: with them


def ending() -> list[signal.Signals]:
    """The signals that end a program in order. Under nohup the end of the terminal is none of them."""
    hangup = (
        [signal.SIGHUP]
        if os.name == "posix" and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        else []
    )
    return [signal.SIGINT, signal.SIGTERM, *hangup]


def ended_by_signals() -> None:
    """From here on, but where a run that can be saved listens."""
    for each in ending():
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, lambda number, frame: leave(number))


def leave(number: int) -> NoReturn:
    tidy()
    way_out(128 + number)
    os._exit(128 + number)


def tidy() -> None:
    for each in (remove_all, tidied):
        with suppress(Exception):
            each()
