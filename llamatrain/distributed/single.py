"""What processes of a run may ask of each other, and the answers of one that is alone."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")
AGAIN = 75  # the exit code of what may go well when it is tried again, as sendmail has it: a scheduler starts it once more


class ExitStatus(NamedTuple):
    """How a process ends that cannot go on."""

    words: str
    code: int
    lost: bool = False  # it could not reach the others, which may have failed before


class Comm(Protocol):
    """`rank` counts from 0 on. What is called on all is called in one order, and comes back where all have come to it."""

    rank: int
    size: int
    sharing: int  # how many have the same processors, this one among them
    here: int  # of those of this machine
    ranks_here: int

    def called(self, rank: int) -> str:
        """It, and its host, in words."""

    def gathered(self, mine: T) -> list[T]:
        """On all: what each has, by rank."""

    def from_first(self, mine: T) -> T:
        """On all: what the first has."""

    def agreed(self) -> AbstractContextManager[None]:
        """On all: what fails on one fails on all, in its words."""

    def compared(self, facts: Mapping[str, Any]) -> None:
        """On all: fails where one is about to do something else, and names the first of these facts that differs there. A fact
        may be a mapping itself."""

    def met(self) -> None:
        """On all: come back when all are there, and leave the processor to others until then."""

    def swap(self, out: "Sequence[Sequence[np.ndarray]]", into: "Sequence[Sequence[np.ndarray]]") -> None:
        """On all: arrays to each of the others, and from each; by rank, in one order on both sides."""

    def send(self, array: "np.ndarray", to: int) -> None: ...

    def receive(self, into: "np.ndarray", of: int) -> None: ...

    def watch(self, timeout: float, words: Callable[[], str]) -> AbstractContextManager[None]:
        """While this is open, one that is silent for so many seconds ends all; the words are the command that goes on."""

    def doing(self, step: int | None, what: str) -> None:
        """What is said of this process should it fall silent from here on; None: in the step that it is in."""

    def failed(self, failure: ExitStatus) -> ExitStatus | None:
        """Ends all, in these words, which one of them says."""

    def close(self, code: int) -> None:
        """On all: nothing more is to come, and the process ends with this."""


class SingleProcess:
    rank, size, here, ranks_here, sharing = 0, 1, 0, 1, 1

    def called(self, rank: int) -> str:
        return "this process"

    def gathered(self, mine: T) -> list[T]:
        return [mine]

    def from_first(self, mine: T) -> T:
        return mine

    @contextmanager
    def agreed(self) -> Iterator[None]:
        yield

    def compared(self, facts: Mapping[str, Any]) -> None: ...

    def met(self) -> None: ...

    def swap(self, out: "Sequence[Sequence[np.ndarray]]", into: "Sequence[Sequence[np.ndarray]]") -> None: ...

    def send(self, array: "np.ndarray", to: int) -> None:
        raise RuntimeError("nobody is there")

    def receive(self, into: "np.ndarray", of: int) -> None:
        raise RuntimeError("nobody is there")

    def watch(self, timeout: float, words: Callable[[], str]) -> AbstractContextManager[None]:
        return nullcontext()

    def doing(self, step: int | None, what: str) -> None: ...

    def failed(self, failure: ExitStatus) -> ExitStatus | None:
        return failure

    def close(self, code: int) -> None: ...
