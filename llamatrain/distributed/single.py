"""The communicator interface, and its implementation for a single process."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")
AGAIN = 75  # the exit code of what may go well when it is tried again, as sendmail has it: a scheduler starts it once more


class ExitStatus(NamedTuple):
    """The message and exit code of a process that failed."""

    words: str
    code: int
    lost: bool = False  # it could not reach the others, which may have failed before


class Comm(Protocol):
    """A communicator. `rank` counts from 0.

    Collective methods must be called by all ranks in the same order, and return when all have called them.
    """

    rank: int
    size: int
    sharing: int  # how many have the same processors, this one among them
    here: int  # of those of this machine
    ranks_here: int

    def called(self, rank: int) -> str:
        """Return rank and host in words."""

    def gathered(self, mine: T) -> list[T]:
        """Return the values of all ranks, by rank (collective)."""

    def from_first(self, mine: T) -> T:
        """Return the value of rank 0 (collective)."""

    def agreed(self) -> AbstractContextManager[None]:
        """Raise an error of one rank on all ranks when the context ends (collective)."""

    def compared(self, facts: Mapping[str, Any]) -> None:
        """Raise if a fact differs between ranks, and name the first one (collective).

        A fact may be a mapping.
        """

    def met(self) -> None:
        """Wait for all ranks without using a processor (collective)."""

    def swap(self, out: "Sequence[Sequence[np.ndarray]]", into: "Sequence[Sequence[np.ndarray]]") -> None:
        """Send arrays to each other rank and receive from each (collective); both lists are indexed by rank."""

    def send(self, array: "np.ndarray", to: int) -> None:
        """Send an array to a rank."""

    def receive(self, into: "np.ndarray", of: int) -> None:
        """Receive an array from a rank."""

    def watch(self, timeout: float, words: Callable[[], str]) -> AbstractContextManager[None]:
        """Watch for silent ranks while the context is open: one that is silent for `timeout` seconds ends all.

        `words` gives the command that resumes the run.
        """

    def doing(self, step: int | None, what: str) -> None:
        """Set the status to report if this process falls silent; step None keeps the present step."""

    def failed(self, failure: ExitStatus) -> ExitStatus | None:
        """End all ranks with this failure, which one of them prints."""

    def close(self, code: int) -> None:
        """Finish communication and end the process (collective)."""


class SingleProcess:
    """The communicator of a single process."""

    rank, size, here, ranks_here, sharing = 0, 1, 0, 1, 1

    def called(self, rank: int) -> str:
        """Return the name of this process."""
        return "this process"

    def gathered(self, mine: T) -> list[T]:
        """Return a list with the own value."""
        return [mine]

    def from_first(self, mine: T) -> T:
        """Return the value."""
        return mine

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Let errors through."""
        yield

    def compared(self, facts: Mapping[str, Any]) -> None:
        """Do nothing."""

    def met(self) -> None:
        """Do nothing."""

    def swap(self, out: "Sequence[Sequence[np.ndarray]]", into: "Sequence[Sequence[np.ndarray]]") -> None:
        """Do nothing."""

    def send(self, array: "np.ndarray", to: int) -> None:
        """Raise, since there is no other process."""
        raise RuntimeError("nobody is there")

    def receive(self, into: "np.ndarray", of: int) -> None:
        """Raise, since there is no other process."""
        raise RuntimeError("nobody is there")

    def watch(self, timeout: float, words: Callable[[], str]) -> AbstractContextManager[None]:
        """Return an empty context."""
        return nullcontext()

    def doing(self, step: int | None, what: str) -> None:
        """Do nothing."""

    def failed(self, failure: ExitStatus) -> ExitStatus | None:
        """Return the failure, to be printed by the caller."""
        return failure

    def close(self, code: int) -> None:
        """Do nothing."""
