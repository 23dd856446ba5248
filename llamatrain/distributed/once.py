"""Runs a function on one process for all. The calls are collective; an error on one is raised on all."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from llamatrain.distributed.comm import Comm, get_comm

T = TypeVar("T")


def run_on_rank_zero(function: Callable[[], T]) -> T:
    """Run a function on rank 0 and return its result on all ranks."""
    comm, results = get_comm(), list[T]()
    with _sync_all(comm):
        if comm.rank == 0:
            results.append(function())
    return comm.broadcast(results)[0]


def run_once_per_host(function: Callable[[], T]) -> T:
    """Run a function first on one rank of each host, then on the others, which find the files it left."""
    comm, results = get_comm(), list[T]()
    for first in (True, False):
        with _sync_all(comm):
            if (comm.local_rank == 0) is first:
                results.append(function())
    return results[0]


def run_once_per_value(value: Hashable, function: Callable[[], T]) -> T:
    """Run a function on the first rank of each distinct value, and share the results."""
    comm = get_comm()
    values, results = comm.all_gather(value), list[T]()
    first = values.index(value)
    with _sync_all(comm):
        if first == comm.rank:
            results.append(function())
    return comm.all_gather(results)[first][0]


@contextmanager
def _sync_all(comm: Comm) -> Iterator[None]:
    """Raise an error of one rank on all, and wait for all without using a processor."""
    with comm.raise_on_all():
        try:
            yield
        finally:
            comm.barrier()
