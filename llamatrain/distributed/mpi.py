"""Communication over MPI."""

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from llamatrain.config.messages import cut, worded
from llamatrain.distributed.heartbeat import TIMEOUT, Heartbeat
from llamatrain.distributed.single import ExitStatus
from llamatrain.distributed.stderr import complain, fault
from llamatrain.errors import LlamatrainError, words_of
from llamatrain.platform import exit
from llamatrain.platform.threads import start_thread

T = TypeVar("T")
LOOKS = 100  # at once, whether all are there
LOOK, SELDOM, MORE = (
    0.0002,
    0.002,
    1.02,
)  # seconds between two looks whether all are there, after that, at first and in the end
GRACE = 1.0  # seconds for each thing that is done where all is ended
PARTING = 60.0  # seconds for all to leave MPI together


class RemoteError(LlamatrainError):
    """The error of another process, raised on all processes."""

    shared = True

    def __init__(self, words: str, exit_code: int) -> None:
        super().__init__(words)
        self.exit_code = exit_code


class MpiComm:
    """The communicator of all processes of an MPI launch. See `Comm` for its methods."""

    def __init__(self, failure: ExitStatus | None = None) -> None:
        told = MPI.COMM_WORLD.allgather((failure, socket.gethostname()))
        self._hosts = [host for _, host in told]
        self.rank, self.size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
        self._one_for_all([each for each, _ in told])
        self._all = MPI.COMM_WORLD.Dup()  # of whoever leads a run
        self._data = MPI.COMM_WORLD.Dup()  # of the thread that exchanges beside it
        self._met = 0  # times that all came together
        self._here = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
        self.here, self.ranks_here = self._here.rank, self._here.size
        own = os.sched_getaffinity(0)
        self.sharing = sum(not own.isdisjoint(each) for each in self._here.allgather(own))
        self._heart = Heartbeat(MPI.COMM_WORLD.Dup(), self.called, self._end) if self.size > 1 else None
        exit.exit_process, sys.excepthook = self.end, self._excepthook
        atexit.register(self._close)

    def called(self, rank: int) -> str:
        """Return rank and host in words."""
        return f"rank {rank} ({cut(self._hosts[rank])})"

    def gathered(self, mine: T) -> list[T]:
        """Return the values of all ranks."""
        self._come(1)
        return self._all.allgather(mine)

    def from_first(self, mine: T) -> T:
        """Return the value of rank 0."""
        self._come(2)
        return self._all.bcast(mine)

    def _come(self, to: int) -> None:
        """Check that all ranks are in the same collective call; a rank on another path would wait forever."""
        self._met += 1
        mine, all_of = np.array([to, self._met], np.int64), np.empty((self.size, 2), np.int64)
        asleep_until(self._all.Iallgather(mine, all_of))
        for rank in range(1, self.size):
            if (all_of[rank] != all_of[0]).any():
                raise RuntimeError(
                    f"{self.called(rank)} and {self.called(0)} wait for each other in different places"
                )

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Raise an error of one rank on all ranks."""
        failed: Exception | None = None
        try:
            yield
        except (LlamatrainError, OSError, MemoryError) as error:
            if getattr(error, "shared", False):
                raise
            failed = error
        mine = ExitStatus(words_of(failed), getattr(failed, "exit_code", 1)) if failed else None
        self._one_for_all(self.gathered(mine), failed)

    def _one_for_all(self, told: list[ExitStatus | None], mine: Exception | None = None) -> None:
        """Raise if any rank failed: this rank's own error if all failed alike, else a RemoteError."""
        rank, first = next(((rank, each) for rank, each in enumerate(told) if each), (0, None))
        if first is None:
            return
        everywhere = all(each == first for each in told)
        if isinstance(mine, LlamatrainError) and everywhere:
            mine.shared = True
            raise mine
        raise RemoteError(
            first.words if everywhere else f"{self.called(rank)}: {first.words}", first.code
        ) from mine

    def compared(self, facts: Mapping[str, Any]) -> None:
        """Raise if these facts differ between ranks."""
        told = self.gathered({name: facts[name] for name in facts})
        for name in told[0]:
            for rank, theirs in enumerate(told):
                if there := different(name, theirs.get(name), told[0][name]):
                    what, its, first = there
                    words = f"{self.called(rank)} is about to do something else: its {what} is {its}, and {first} on"
                    raise RemoteError(f"{words} {self.called(0)}", 1)

    def met(self) -> None:
        """Wait for all ranks without spinning: MPI busy-waits, and ranks share cores."""
        asleep_until(self._data.Ibarrier())

    def swap(self, out: Sequence[Sequence[np.ndarray]], into: Sequence[Sequence[np.ndarray]]) -> None:
        """Exchange arrays with all other ranks."""
        requests = []
        for step in range(1, self.size):
            source, to = (self.rank - step) % self.size, (self.rank + step) % self.size
            requests += [self._data.Irecv(each.view(np.uint8), source) for each in into[source]]
            requests += [self._data.Isend(each.view(np.uint8), to) for each in out[to]]
        MPI.Request.Waitall(requests)

    def send(self, array: np.ndarray, to: int) -> None:
        """Send an array to a rank."""
        self._all.Send(array.view(np.uint8), to)

    def receive(self, into: np.ndarray, of: int) -> None:
        """Receive an array from a rank."""
        self._all.Recv(into.view(np.uint8), of)

    # ---- whether all go on -------------------------------------------------

    @contextmanager
    def watch(self, timeout: float, words: Callable[[], str]) -> Iterator[None]:
        """Set timeout and resume command of the heartbeat for the time of a run."""
        if not (heart := self._heart):
            yield
            return
        heart.timeout, heart.words = timeout, words
        try:
            yield
        except Exception as error:
            if not getattr(error, "shared", False):  # nobody who catches it could go on
                self._uncaught(error)
            raise
        finally:
            heart.timeout, heart.words, heart.doing = TIMEOUT, lambda: "", (0, "the end")

    def _excepthook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """End all processes on an uncaught error of a program that uses the package."""
        if not getattr(error, "shared", False):
            self._uncaught(error)
        sys.__excepthook__(kind, error, trace)

    def _uncaught(self, error: BaseException) -> None:
        if isinstance(error, LlamatrainError | OSError | MemoryError):
            self.failed(ExitStatus(words_of(error), getattr(error, "exit_code", 1)))
        elif isinstance(error, Exception):
            self.failed(fault(error))

    def doing(self, step: int | None, what: str) -> None:
        """Set the status that heartbeats carry."""
        if self._heart:
            self._heart.doing = self._heart.doing[0] if step is None else step, what

    def failed(self, failure: ExitStatus) -> ExitStatus | None:
        """End all processes; return the failure if this one must print it."""
        if not self._heart:
            return failure
        self._heart.fail(failure)
        return None

    def close(self, code: int) -> None:
        """Leave MPI, and exit after a time limit even if that hangs."""
        timer = threading.Timer(PARTING, os._exit, [code])
        timer.daemon = True
        with suppress(MemoryError):
            start_thread(timer)
        self._close()

    def _close(self) -> None:
        exit.exit_process = os._exit
        if heart := self._heart:
            self._heart = None
            heart.stop()

    def end(self, code: int) -> None:
        """End all processes with this exit code."""
        self._end(code, "")

    def _end(self, code: int, words: str) -> None:
        """Clean up with a time limit per step, silence MPI's abort message, then exit."""
        for act in (exit.clean_up, lambda: last_words(words), lambda: quiet() and MPI.COMM_WORLD.Abort(code)):
            thread = threading.Thread(target=act, daemon=True)
            with suppress(MemoryError):
                start_thread(thread)
                thread.join(GRACE)
        os._exit(code)


def asleep_until(request: MPI.Request) -> None:
    """Wait for a request with short sleeps instead of spinning."""
    for _ in range(LOOKS):
        if request.Test():
            return
    pause = LOOK
    while not request.Test():
        time.sleep(pause)
        pause = min(SELDOM, pause * MORE)


def last_words(words: str) -> None:
    """Print the message, if there is one."""
    if words:
        complain(words)


def quiet() -> bool:
    """Redirect standard error to the null device, and return True."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    return True


def different(name: str, its: Any, first: Any) -> tuple[str, str, str] | None:
    """Return the name and both values of the first difference, in short; mappings are compared by key."""
    if its == first:
        return None
    if isinstance(its, Mapping) and isinstance(first, Mapping):
        inside = (
            different(f"{name} {each}", its.get(each), first.get(each))
            for each in dict.fromkeys((*first, *its))
        )
        return next(each for each in inside if each)
    return name, short(its), short(first)


def short(value: Any) -> str:
    """Return a value in words."""
    return "not there" if value is None else worded(value)
