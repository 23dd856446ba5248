"""What one of several processes makes for others. All of them come here, in one order; what fails for one fails for all."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from llamatrain.distributed.comm import Comm, world

T = TypeVar("T")


def made_once(make: Callable[[], T]) -> T:
    """By the first, who tells the others what came of it."""
    everyone, made = world(), list[T]()
    with _awaited(everyone):
        if everyone.rank == 0:
            made.append(make())
    return everyone.from_first(made)[0]


def made_here_once(make: Callable[[], T]) -> T:
    """By the first of each machine; the others there come after it, and find what it left."""
    everyone, made = world(), list[T]()
    for first in (True, False):
        with _awaited(everyone):
            if (everyone.here == 0) is first:
                made.append(make())
    return made[0]


def made_once_of_each(what: Hashable, make: Callable[[], T]) -> T:
    """By the first of those that have the same; what is made of it is the same for all of them."""
    everyone = world()
    having, made = everyone.gathered(what), list[T]()
    first = having.index(what)
    with _awaited(everyone):
        if first == everyone.rank:
            made.append(make())
    return everyone.gathered(made)[first][0]


@contextmanager
def _awaited(everyone: Comm) -> Iterator[None]:
    """By those who have nothing to do meanwhile, who leave the processor to whoever has."""
    with everyone.agreed():
        try:
            yield
        finally:
            everyone.met()
