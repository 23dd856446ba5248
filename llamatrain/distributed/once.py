"""Runs a function on one process for all. The calls are collective; an error on one is raised on all."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from llamatrain.distributed.comm import Comm, world

T = TypeVar("T")


def made_once(make: Callable[[], T]) -> T:
    """Run a function on rank 0 and return its result on all ranks."""
    everyone, made = world(), list[T]()
    with _awaited(everyone):
        if everyone.rank == 0:
            made.append(make())
    return everyone.from_first(made)[0]


def made_here_once(make: Callable[[], T]) -> T:
    """Run a function first on one rank of each host, then on the others, which find the files it left."""
    everyone, made = world(), list[T]()
    for first in (True, False):
        with _awaited(everyone):
            if (everyone.here == 0) is first:
                made.append(make())
    return made[0]


def made_once_of_each(what: Hashable, make: Callable[[], T]) -> T:
    """Run a function on the first rank of each distinct value, and share the results."""
    everyone = world()
    having, made = everyone.gathered(what), list[T]()
    first = having.index(what)
    with _awaited(everyone):
        if first == everyone.rank:
            made.append(make())
    return everyone.gathered(made)[first][0]


@contextmanager
def _awaited(everyone: Comm) -> Iterator[None]:
    """Raise an error of one rank on all, and wait for all without using a processor."""
    with everyone.agreed():
        try:
            yield
        finally:
            everyone.met()
