"""What processes of a run may ask of each other, and the answers of one that is alone."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeVar

import numpy as np

T = TypeVar("T")


class World(Protocol):
    """`rank` counts from 0 on. What is called on all is called in one order, and comes back where all have come to it."""

    rank: int
    size: int
    sharing: int  # how many have the same processors, this one among them
    here: int  # of those of this machine
    ranks_here: int

    def gathered(self, mine: T) -> list[T]:
        """On all: what each has, by rank."""

    def from_first(self, mine: T) -> T:
        """On all: what the first has."""

    def in_turn(self, what: str) -> AbstractContextManager[None]:
        """On all: what the first of a machine makes, the others there find."""

    def agreed(self) -> AbstractContextManager[None]:
        """On all: what fails on one fails on all, in its words."""

    def met(self) -> None:
        """On all: come back when all are there, and leave the processor to others until then."""

    def swap(self, out: Sequence[Sequence[np.ndarray]], into: Sequence[Sequence[np.ndarray]]) -> None:
        """On all: arrays to each of the others, and from each; by rank, in one order on both sides."""

    def send(self, array: np.ndarray, to: int) -> None: ...

    def receive(self, into: np.ndarray, of: int) -> None: ...

    def end(self, code: int) -> None:
        """At once, with all others."""


class Alone:
    rank, size, here, ranks_here, sharing = 0, 1, 0, 1, 1

    def gathered(self, mine: T) -> list[T]:
        return [mine]

    def from_first(self, mine: T) -> T:
        return mine

    @contextmanager
    def in_turn(self, what: str) -> Iterator[None]:
        yield

    @contextmanager
    def agreed(self) -> Iterator[None]:
        yield

    def met(self) -> None: ...

    def swap(self, out: Sequence[Sequence[np.ndarray]], into: Sequence[Sequence[np.ndarray]]) -> None: ...

    def send(self, array: np.ndarray, to: int) -> None:
        raise RuntimeError("nobody is there")

    def receive(self, into: np.ndarray, of: int) -> None:
        raise RuntimeError("nobody is there")

    def end(self, code: int) -> None: ...
