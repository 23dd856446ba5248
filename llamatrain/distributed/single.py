"""The communicator interface, and its implementation for a single process."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")
EXIT_RETRY = 75  # EX_TEMPFAIL of sendmail: a scheduler may start the run again


class ExitStatus(NamedTuple):
    """The message and exit code of a process that failed."""

    message: str
    exit_code: int
    peer_lost: bool = False  # it could not reach the others, which may have failed first
    code: str = ""  # of the LlamatrainError, unless the message contains it


class Comm(Protocol):
    """A communicator. `rank` counts from 0.

    Collective methods must be called by all ranks in the same order, and return when all have called them.
    """

    rank: int
    size: int
    core_sharing: int  # ranks that share this rank's processors, itself included
    local_rank: int  # rank on this host
    local_size: int

    def describe_rank(self, rank: int) -> str:
        """Return rank and host in words."""

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank (collective)."""

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0 (collective)."""

    def raise_on_all(self) -> AbstractContextManager[None]:
        """Raise an error of one rank on all ranks when the context ends (collective)."""

    def assert_equal_on_all(self, facts: Mapping[str, Any]) -> None:
        """Raise if a fact differs between ranks, and name the first one (collective).

        A fact may be a mapping.
        """

    def barrier(self) -> None:
        """Wait for all ranks without using a processor (collective)."""

    def all_to_all(
        self, out: "Sequence[Sequence[np.ndarray]]", into: "Sequence[Sequence[np.ndarray]]"
    ) -> None:
        """Send arrays to each other rank and receive from each (collective); both lists are indexed by rank."""

    def send(self, array: "np.ndarray", to: int) -> None:
        """Send an array to a rank."""

    def receive(self, into: "np.ndarray", of: int) -> None:
        """Receive an array from a rank."""

    def watch(self, timeout: float, get_command: Callable[[], str]) -> AbstractContextManager[None]:
        """Watch for silent ranks while the context is open: one that is silent for `timeout` seconds ends all.

        `get_command` returns the command that resumes the run.
        """

    def set_status(self, step: int | None, status: str) -> None:
        """Set the status to report if this process falls silent; step None keeps the present step."""

    def abort(self, failure: ExitStatus) -> ExitStatus | None:
        """End all ranks with this failure, which one of them prints."""

    def close(self, code: int) -> None:
        """Finish communication and end the process (collective)."""


class SingleProcess:
    """The communicator of a single process."""

    rank, size, local_rank, local_size, core_sharing = 0, 1, 0, 1, 1

    def describe_rank(self, rank: int) -> str:
        """Return the name of this process."""
        return "this process"

    def all_gather(self, value: T) -> list[T]:
        """Return a list with the own value."""
        return [value]

    def broadcast(self, value: T) -> T:
        """Return the value."""
        return value

    @contextmanager
    def raise_on_all(self) -> Iterator[None]:
        """Let errors through."""
        yield

    def assert_equal_on_all(self, facts: Mapping[str, Any]) -> None:
        """Do nothing."""

    def barrier(self) -> None:
        """Do nothing."""

    def all_to_all(
        self, out: "Sequence[Sequence[np.ndarray]]", into: "Sequence[Sequence[np.ndarray]]"
    ) -> None:
        """Do nothing."""

    def send(self, array: "np.ndarray", to: int) -> None:
        """Raise, since there is no other process."""
        raise RuntimeError("there is no other process")

    def receive(self, into: "np.ndarray", of: int) -> None:
        """Raise, since there is no other process."""
        raise RuntimeError("there is no other process")

    def watch(self, timeout: float, get_command: Callable[[], str]) -> AbstractContextManager[None]:
        """Return an empty context."""
        return nullcontext()

    def set_status(self, step: int | None, status: str) -> None:
        """Do nothing."""

    def abort(self, failure: ExitStatus) -> ExitStatus | None:
        """Return the failure, to be printed by the caller."""
        return failure

    def close(self, code: int) -> None:
        """Do nothing."""
