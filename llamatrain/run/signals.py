"""Handles Ctrl-C, SIGTERM and the loss of the terminal.

The first signal saves the run, a second one exits at once.
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
from pathlib import Path
from types import TracebackType
from typing import Self

from llamatrain.platform.exit import exit_on_signal, exit_signals
from llamatrain.platform.threads import start_thread

# seconds: signals that come so close were meant as one, such as those of `timeout` to a process and to its
# group
SAME_SIGNAL = 0.3


def drop_lost_terminal() -> None:
    """Redirect output to nowhere if the terminal is gone, so that writing does not fail."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # one without a number
            descriptor = stream.fileno()
            try:
                os.write(descriptor, b"")
            except OSError as error:
                if error.errno == errno.EIO:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def is_main_thread() -> bool:
    """Return True in the main thread, the only one that can handle signals."""
    return threading.current_thread() is threading.main_thread()


class Interrupts:
    """Signals that arrived while this is open.

    `pending` is the number of the first one, once the run can be saved.
    """

    owns_process = False  # the process is there for the run alone

    def __init__(self) -> None:
        self.pending, self.can_save = 0, False
        self.on_exit: Callable[[], None] = lambda: None  # called where the process is ended at once
        self.after_exit: Callable[[], None] = lambda: None  # and after that
        self.saved_folder: Path | None = None  # the folder of what was saved

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class CommandInterrupts(Interrupts):
    """Signals of a process that exists for the run. Before there is anything to save, the first one ends it.

    A thread listens, since Python's own handlers wait until compiled code in the main thread returns.
    """

    owns_process = True

    def __enter__(self) -> Self:
        self._main = is_main_thread()
        if self._main:
            self._handlers = {
                number: signal.signal(number, lambda number, frame: None) for number in exit_signals()
            }
            self._reader, self._writer = socket.socketpair()
            self._writer.setblocking(False)
            self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            start_thread(threading.Thread(target=self._listen, args=(self._reader,), daemon=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._main:
            signal.set_wakeup_fd(self._wakeup)
            for number, before in self._handlers.items():
                signal.signal(number, before)
            self._writer.close()  # ends the thread, which closes its own end

    def _listen(self, reader: socket.socket) -> None:
        with reader:
            while numbers := reader.recv(16):
                for number in numbers:
                    self._on_signal(number)

    def _on_signal(self, number: int) -> None:
        if number not in self._handlers:
            return
        drop_lost_terminal()
        if self.can_save and not self.pending:
            self.pending, self._first = number, time.monotonic()
            return
        if self.pending and time.monotonic() - self._first < SAME_SIGNAL:
            return
        for tell in (self.on_exit, self.after_exit):
            with suppress(Exception):
                tell()
        exit_on_signal(number)


class CallerInterrupts(Interrupts):
    """Ctrl-C in a process that called the Python API.

    It becomes a KeyboardInterrupt; other signals stay the caller's.
    """

    def __enter__(self) -> Self:
        self._handler = signal.getsignal(signal.SIGINT) if is_main_thread() else None
        if callable(self._handler):
            signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if callable(self._handler):
            signal.signal(signal.SIGINT, self._handler)
        if self.pending and error is None:
            raise KeyboardInterrupt(f"the run is saved; continue with resume={str(self.saved_folder)!r}")

    def _on_signal(self, number: int, frame: object) -> None:
        if self.pending or not self.can_save:
            raise KeyboardInterrupt
        self.pending = number
