"""How a program of its own ends where a signal says so: at once, with its temporary files gone and its terminal in order.

No KeyboardInterrupt comes up for that: it may come in the midst of an import, or where Python can but print and forget it.
"""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from llamatrain.platform.temp_files import remove_all
from llamatrain.platform.terminal import restore_terminal

exit_process: Callable[[int], object] = os._exit  # of one that was started together with others: with them


def exit_signals() -> list[signal.Signals]:
    """The signals that end a program in order. Under nohup the end of the terminal is none of them."""
    hangup = (
        [signal.SIGHUP]
        if os.name == "posix" and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        else []
    )
    return [signal.SIGINT, signal.SIGTERM, *hangup]


def install_exit_handlers() -> None:
    """From here on, but where a run that can be saved listens."""
    for signal_number in exit_signals():
        if signal.getsignal(signal_number) is not signal.SIG_IGN:
            signal.signal(signal_number, lambda number, frame: exit_on_signal(number))


def exit_on_signal(number: int) -> NoReturn:
    clean_up()
    exit_process(128 + number)
    os._exit(128 + number)


def clean_up() -> None:
    for action in (remove_all, restore_terminal):
        with suppress(Exception):
            action()
