"""The processes of a run and how they communicate.

Only `mpi` knows MPI, and it is imported only if a launcher started the process. Functions marked "collective"
must be called by all processes in the same order; with one process they return at once.
"""

from functools import cache

from llamatrain.distributed.launcher import LaunchInfo, launched
from llamatrain.distributed.single import Comm, ExitStatus, SingleProcess
from llamatrain.distributed.stderr import fault
from llamatrain.errors import LlamatrainError, words_of

__all__ = [
    "Comm",
    "ExitStatus",
    "LaunchInfo",
    "close",
    "fault",
    "found",
    "is_told_here",
    "launched",
    "met",
    "told",
    "world",
]


@cache
def world() -> Comm:
    """Return the communicator of the processes that were launched together with this one."""
    started = launched()
    if started is None:
        return SingleProcess()
    from llamatrain.distributed.init import joined

    return joined(started)


def found() -> Comm | None:
    """Return the communicator, if it exists already."""
    return world() if world.cache_info().currsize else None


def is_told_here() -> bool:
    """Return True if this process prints: only rank 0 does."""
    started = launched()
    return started is None or started.rank == 0


def told(failure: ExitStatus, shared: bool = False) -> ExitStatus | None:
    """Return the failure that this process must print, or None if another one prints it.

    If the other processes do not know of the failure, end all of them.
    """
    started = launched()
    if started is None or not started.several or shared:
        return failure if is_told_here() else None
    if there := found():
        return there.failed(failure)
    if failure.lost:
        return failure
    from llamatrain.distributed.init import joined

    try:
        joined(started, failure)
    except LlamatrainError as error:  # what all have to say, or that there is nothing to speak by
        failure = ExitStatus(words_of(error), error.exit_code) if error.shared else failure
    return failure if is_told_here() else None


def met() -> None:
    """Wait for all processes at the end of a run (collective): rank 0 may have more to do."""
    if there := found():
        there.met()


def close(code: int) -> None:
    """Finish communication and end the process with this exit code (collective)."""
    if there := found():
        there.close(code)
