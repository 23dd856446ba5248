"""Ctrl-C, SIGTERM and the end of a terminal in a run: the first asks it to save and end, the second ends it at once.

A thread listens, since Python's own handlers wait for the end of whatever compiled code the main thread is in.
"""

import errno
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

ONE = 0.3  # seconds: signals that come so close were meant as one, such as those of `timeout` to a process and to its group
SHOW_CURSOR = "\x1b[?25h"  # a display that is left at once may have hidden it


def ending() -> list[signal.Signals]:
    """The signals that end a program in order. Under nohup the end of the terminal is none of them."""
    hangup = [signal.SIGHUP] if os.name == "posix" and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []
    return [signal.SIGINT, signal.SIGTERM, *hangup]


def without_terminal() -> None:
    """Where the terminal is no more, what would be written to it goes nowhere, and does not fail."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # one without a number
            place = stream.fileno()
            try:
                os.write(place, b"")
            except OSError as error:
                if error.errno == errno.EIO:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), place)


class Interrupts:
    """While this is open, `asked` is the number of the signal that came, or 0.

    Before there is anything to save, the first signal ends the process; `leaving` is called then.
    """

    def __init__(self, leaving: Callable[[], None] = lambda: None) -> None:
        self.asked, self.saving, self.leaving = 0, False, leaving

    def __enter__(self) -> Self:
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:  # elsewhere there are no signals to be had
            self._before = {each: signal.signal(each, lambda number, frame: None) for each in ending()}
            self._reader, self._writer = socket.socketpair()
            self._writer.setblocking(False)
            self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._listen, args=(self._reader,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._main:
            signal.set_wakeup_fd(self._wakeup)
            for each, before in self._before.items():
                signal.signal(each, before)
            self._writer.close()  # ends the thread, which closes its own end

    def _listen(self, reader: socket.socket) -> None:
        with reader:
            while numbers := reader.recv(16):
                for number in numbers:
                    self._note(number)

    def _note(self, number: int) -> None:
        if number not in self._before:
            return
        without_terminal()
        if self.saving and not self.asked:
            self.asked, self._first = number, time.monotonic()
            return
        if self.asked and time.monotonic() - self._first < ONE:
            return
        with suppress(Exception):
            self.leaving()
        if sys.stderr.isatty():
            os.write(sys.stderr.fileno(), SHOW_CURSOR.encode())
        os._exit(128 + number)
