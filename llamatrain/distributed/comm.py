"""How many processes a run is of, and what they tell each other. Only `mpi` knows MPI, and it is imported only where a launcher
has started the process.

What is called on all of them, in one order, says so; a process that is alone is all of them.
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
    """Those that this process was started with."""
    started = launched()
    if started is None:
        return SingleProcess()
    from llamatrain.distributed.init import joined

    return joined(started)


def found() -> Comm | None:
    """Them, where this process has met them already."""
    return world() if world.cache_info().currsize else None


def is_told_here() -> bool:
    """Of several only the first prints what all have to say."""
    started = launched()
    return started is None or started.rank == 0


def told(failure: ExitStatus, shared: bool = False) -> ExitStatus | None:
    """What is to be said by this process, which has failed; where that is nothing, it is said elsewhere. Where the others know
    nothing of it all are ended here."""
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
    """On all, at the end: the first may have more to do than the others."""
    if there := found():
        there.met()


def close(code: int) -> None:
    """On all: nothing more is to come, and the process ends with this."""
    if there := found():
        there.close(code)
