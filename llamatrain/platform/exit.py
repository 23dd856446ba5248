"""Exits on signals: at once, with temporary files removed and the terminal restored.

KeyboardInterrupt is not used: it may occur during an import, or where Python can only print and ignore it.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from llamatrain.platform.temp_files import remove_all
from llamatrain.platform.terminal import restore_terminal

exit_process: Callable[[int], object] = os._exit  # distributed runs replace it to stop all ranks


# of Windows: the window is closed, the user logs off, the machine shuts down
CLOSING_EVENTS = (2, 5, 6)
CLOSING_SECONDS = 4.5  # after which Windows ends a process that is told so, less half a second
_close_handlers = list[Any]()  # kept alive for Windows


def exit_signals() -> list[signal.Signals]:
    """Return the signals that exit the program. Under nohup, SIGHUP is not one of them."""
    if sys.platform == "win32":
        return [signal.SIGINT, signal.SIGTERM, signal.SIGBREAK]
    else:
        hangup = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []
        return [signal.SIGINT, signal.SIGTERM, *hangup]


def handle_closed_window() -> None:
    """Let the closing of a window on Windows act like Ctrl-Break, which saves a run, and wait for its end."""
    if sys.platform == "win32":

        def on_event(event: int) -> bool:
            if event not in CLOSING_EVENTS:
                return False
            signal.raise_signal(signal.SIGBREAK)
            time.sleep(CLOSING_SECONDS)
            return True

        handler = ctypes.WINFUNCTYPE(ctypes.c_int, ctypes.c_uint32)(on_event)
        _close_handlers.append(handler)
        ctypes.WinDLL("kernel32").SetConsoleCtrlHandler(handler, 1)


def install_exit_handlers() -> None:
    """Exit on these signals from now on; a run that can be saved installs its own handlers."""
    for signal_number in exit_signals():
        if signal.getsignal(signal_number) is not signal.SIG_IGN:
            signal.signal(signal_number, lambda number, frame: exit_on_signal(number))
    handle_closed_window()


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
