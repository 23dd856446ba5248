"""A limit for what must not take long."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class TooLong(BaseException):
    """No error that a program would take for its own."""


@contextmanager
def in_time(seconds: float) -> Iterator[None]:
    """By the processor's clock: how busy the machine is does not count."""

    def late(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
