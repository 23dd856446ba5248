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

from llamatrain.config.messages import quote, shorten
from llamatrain.distributed.heartbeat import TIMEOUT, Heartbeat
from llamatrain.distributed.single import ExitStatus
from llamatrain.distributed.stderr import exit_status_for, print_error
from llamatrain.errors import LlamatrainError, describe, words_of
from llamatrain.platform import exit
from llamatrain.platform.affinity import usable_cpus
from llamatrain.platform.threads import start_thread

T = TypeVar("T")
SPINS = 100  # tests of a request without a pause
MIN_PAUSE = 0.0002  # seconds of the first pause between two tests
MAX_PAUSE = 0.002  # seconds of the longest pause
PAUSE_GROWTH = 1.02
GRACE = 1.0  # seconds for each step of ending all processes
FORWARD = 0.05  # seconds in which the launcher passes a message on
CLOSE_TIMEOUT = 60.0  # seconds in which all must leave MPI


class RemoteError(LlamatrainError):
    """The error of another process, raised on all processes."""

    shared = True

    def __init__(self, message: str, exit_code: int, *, code: str = "") -> None:
        super().__init__(message, code=code)
        self.exit_code = exit_code


class MpiComm:
    """The communicator of all processes of an MPI launch. See `Comm` for its methods."""

    def __init__(self, failure: ExitStatus | None = None) -> None:
        gathered = MPI.COMM_WORLD.allgather((failure, socket.gethostname()))
        self._hosts = [host for _, host in gathered]
        self.rank, self.size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
        self._raise_first([status for status, _ in gathered])
        self._all = MPI.COMM_WORLD.Dup()  # of the main thread
        self._data = MPI.COMM_WORLD.Dup()  # of the reduction thread
        self._calls = 0  # collective calls so far
        self._host_comm = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank, self.local_size = self._host_comm.rank, self._host_comm.size
        own_cores = usable_cpus()
        self.core_sharing = sum(
            not own_cores.isdisjoint(cores) for cores in self._host_comm.allgather(own_cores)
        )
        self._heartbeat = (
            Heartbeat(MPI.COMM_WORLD.Dup(), self.describe_rank, self._end) if self.size > 1 else None
        )
        exit.exit_process, sys.excepthook = self.end, self._excepthook
        atexit.register(self._close)

    def describe_rank(self, rank: int) -> str:
        """Return rank and host in words."""
        return f"rank {rank} ({shorten(self._hosts[rank])})"

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks."""
        self._check_same_call(1)
        return self._all.allgather(value)

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0."""
        self._check_same_call(2)
        return self._all.bcast(value)

    def _check_same_call(self, call: int) -> None:
        """Check that all ranks are in the same collective call; a rank on another path would wait forever."""
        self._calls += 1
        own, gathered = np.array([call, self._calls], np.int64), np.empty((self.size, 2), np.int64)
        wait_asleep(self._all.Iallgather(own, gathered))
        for rank in range(1, self.size):
            if (gathered[rank] != gathered[0]).any():
                raise RuntimeError(
                    f"{self.describe_rank(rank)} and {self.describe_rank(0)} are in different "
                    "collective calls"
                )

    @contextmanager
    def raise_on_all(self) -> Iterator[None]:
        """Raise an error of one rank on all ranks."""
        failure: Exception | None = None
        try:
            yield
        except (LlamatrainError, OSError, MemoryError) as error:
            if getattr(error, "shared", False):
                raise
            failure = error
        status = (
            ExitStatus(words_of(failure), getattr(failure, "exit_code", 1), code=getattr(failure, "code", ""))
            if failure
            else None
        )
        self._raise_first(self.all_gather(status), failure)

    def _raise_first(self, statuses: list[ExitStatus | None], own_error: Exception | None = None) -> None:
        """Raise if any rank failed: this rank's own error if all failed alike, else a RemoteError."""
        rank, first = next(((rank, status) for rank, status in enumerate(statuses) if status), (0, None))
        if first is None:
            return
        same_on_all = all(status == first for status in statuses)
        if isinstance(own_error, LlamatrainError) and same_on_all:
            own_error.shared = True
            raise own_error
        raise RemoteError(
            first.message if same_on_all else f"{self.describe_rank(rank)}: {first.message}",
            first.exit_code,
            code=first.code,
        ) from own_error

    def assert_equal_on_all(self, facts: Mapping[str, Any]) -> None:
        """Raise if these facts differ between ranks."""
        gathered = self.all_gather({name: facts[name] for name in facts})
        for name in gathered[0]:
            for rank, theirs in enumerate(gathered):
                if difference := first_difference(name, theirs.get(name), gathered[0][name]):
                    what, its, first = difference
                    ranks = f"{self.describe_rank(rank)} differs from {self.describe_rank(0)}"
                    raise RemoteError(
                        f"{ranks}: its {what} is {its} (not {first}); start all ranks in the same way",
                        1,
                        code="ranks-differ",
                    )

    def barrier(self) -> None:
        """Wait for all ranks without spinning: MPI busy-waits, and ranks share cores."""
        wait_asleep(self._data.Ibarrier())

    def all_to_all(self, out: Sequence[Sequence[np.ndarray]], into: Sequence[Sequence[np.ndarray]]) -> None:
        """Exchange arrays with all other ranks."""
        requests = []
        for step in range(1, self.size):
            source, to = (self.rank - step) % self.size, (self.rank + step) % self.size
            requests += [self._data.Irecv(array.view(np.uint8), source) for array in into[source]]
            requests += [self._data.Isend(array.view(np.uint8), to) for array in out[to]]
        MPI.Request.Waitall(requests)

    def send(self, array: np.ndarray, to: int) -> None:
        """Send an array to a rank."""
        self._all.Send(array.view(np.uint8), to)

    def receive(self, into: np.ndarray, of: int) -> None:
        """Receive an array from a rank."""
        self._all.Recv(into.view(np.uint8), of)

    # ---- whether all go on -------------------------------------------------

    @contextmanager
    def watch(self, timeout: float, get_command: Callable[[], str]) -> Iterator[None]:
        """Set timeout and resume command of the heartbeat for the time of a run."""
        if not (heartbeat := self._heartbeat):
            yield
            return
        heartbeat.timeout, heartbeat.get_command = timeout, get_command
        try:
            yield
        except Exception as error:
            if not getattr(error, "shared", False):  # a caller that catches it cannot continue
                self._report_uncaught(error)
            raise
        finally:
            heartbeat.timeout, heartbeat.get_command, heartbeat.status = TIMEOUT, lambda: "", (0, "the end")

    def _excepthook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """End all processes on an uncaught error of a program that uses the package."""
        if not getattr(error, "shared", False):
            self._report_uncaught(error)
        sys.__excepthook__(kind, error, trace)

    def _report_uncaught(self, error: BaseException) -> None:
        if isinstance(error, LlamatrainError | OSError | MemoryError):
            self.abort(ExitStatus(describe(error), getattr(error, "exit_code", 1)))
        elif isinstance(error, Exception):
            self.abort(exit_status_for(error))

    def set_status(self, step: int | None, status: str) -> None:
        """Set the status that heartbeats carry."""
        if self._heartbeat:
            self._heartbeat.status = self._heartbeat.status[0] if step is None else step, status

    def abort(self, failure: ExitStatus) -> ExitStatus | None:
        """End all processes; return the failure if this one must print it."""
        if not self._heartbeat:
            return failure
        self._heartbeat.fail(failure)
        return None

    def close(self, code: int) -> None:
        """Leave MPI, and exit after a time limit even if that hangs."""
        timer = threading.Timer(CLOSE_TIMEOUT, os._exit, [code])
        timer.daemon = True
        with suppress(MemoryError):
            start_thread(timer)
        self._close()

    def _close(self) -> None:
        exit.exit_process = os._exit
        if heartbeat := self._heartbeat:
            self._heartbeat = None
            heartbeat.stop()

    def end(self, code: int) -> None:
        """End all processes with this exit code."""
        self._end(code, "")

    def _end(self, code: int, message: str) -> None:
        """Clean up with a time limit per step, silence MPI's abort message, then exit."""
        for step in (
            exit.clean_up,
            lambda: print_message(message),
            lambda: silence_stderr() and MPI.COMM_WORLD.Abort(code),
        ):
            thread = threading.Thread(target=step, daemon=True)
            with suppress(MemoryError):
                start_thread(thread)
                thread.join(GRACE)
        os._exit(code)


def wait_asleep(request: MPI.Request) -> None:
    """Wait for a request with short sleeps instead of spinning."""
    for _ in range(SPINS):
        if request.Test():
            return
    pause = MIN_PAUSE
    while not request.Test():
        time.sleep(pause)
        pause = min(MAX_PAUSE, pause * PAUSE_GROWTH)


def print_message(message: str) -> None:
    """Print the message, if there is one, and give the launcher time to pass it on before MPI's abort."""
    if message:
        print_error(message)
        time.sleep(FORWARD)


def silence_stderr() -> bool:
    """Redirect standard error to the null device, and return True."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    return True


def first_difference(name: str, own: Any, first: Any) -> tuple[str, str, str] | None:
    """Return the name and both values of the first difference, in short; mappings are compared by key."""
    if own == first:
        return None
    if isinstance(own, Mapping) and isinstance(first, Mapping):
        differences = (
            first_difference(f"{name} {key}", own.get(key), first.get(key))
            for key in dict.fromkeys((*first, *own))
        )
        return next(key for key in differences if key)
    return name, format_value(own), format_value(first)


def format_value(value: Any) -> str:
    """Return a value in words."""
    return "not there" if value is None else quote(value)
