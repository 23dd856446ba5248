"""Exits on signals: at once, with temporary files removed and the terminal restored.

KeyboardInterrupt is not used: it may occur during an import, or where Python can only print and ignore it.
"""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from llamatrain.platform.temp_files import remove_all
from llamatrain.platform.terminal import restore_terminal

exit_process: Callable[[int], object] = os._exit  # distributed runs replace it to stop all ranks


def exit_signals() -> list[signal.Signals]:
    """Return the signals that exit the program. Under nohup, SIGHUP is not one of them."""
    hangup = (
        [signal.SIGHUP]
        if os.name == "posix" and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        else []
    )
    return [signal.SIGINT, signal.SIGTERM, *hangup]


def install_exit_handlers() -> None:
    """Exit on these signals from now on; a run that can be saved installs its own handlers."""
    for signal_number in exit_signals():
        if signal.getsignal(signal_number) is not signal.SIG_IGN:
            signal.signal(signal_number, lambda number, frame: exit_on_signal(number))


def exit_on_signal(number: int) -> NoReturn:
    """Clean up and exit with the status of a signal."""
    clean_up()
    exit_process(128 + number)
    os._exit(128 + number)


def clean_up() -> None:
    """Remove temporary files and restore the terminal."""
    for action in (remove_all, restore_terminal):
        with suppress(Exception):
            action()
