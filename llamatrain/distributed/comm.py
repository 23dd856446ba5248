"""The processes of a run and how they communicate.

Only `mpi` knows MPI, and it is imported only if a launcher started the process. Functions marked "collective"
must be called by all processes in the same order; with one process they return at once.
"""

from functools import cache

from llamatrain.distributed.launcher import LaunchInfo, get_launch_info
from llamatrain.distributed.single import Comm, ExitStatus, SingleProcess
from llamatrain.distributed.stderr import exit_status_for
from llamatrain.errors import LlamatrainError, describe

__all__ = [
    "Comm",
    "ExitStatus",
    "LaunchInfo",
    "close",
    "existing_comm",
    "exit_status_for",
    "failure_to_print",
    "get_comm",
    "get_launch_info",
    "is_printing_rank",
    "wait_for_all",
]


@cache
def get_comm() -> Comm:
    """Return the communicator of the processes that were launched together with this one."""
    launch = get_launch_info()
    if launch is None:
        return SingleProcess()
    from llamatrain.distributed.init import join

    return join(launch)


def existing_comm() -> Comm | None:
    """Return the communicator, if it exists already."""
    return get_comm() if get_comm.cache_info().currsize else None


def is_printing_rank() -> bool:
    """Return True if this process prints: only rank 0 does."""
    launch = get_launch_info()
    return launch is None or launch.rank == 0


def failure_to_print(failure: ExitStatus, shared: bool = False) -> ExitStatus | None:
    """Return the failure that this process must print, or None if another one prints it.

    If the other processes do not know of the failure, end all of them.
    """
    launch = get_launch_info()
    if launch is None or not launch.is_multi_process or shared:
        return failure if is_printing_rank() else None
    if comm := existing_comm():
        return comm.abort(failure)
    if failure.peer_lost:
        return failure
    from llamatrain.distributed.init import join

    try:
        join(launch, failure)
    except LlamatrainError as error:  # an error of all processes, or MPI cannot be used
        failure = ExitStatus(describe(error), error.exit_code) if error.shared else failure
    return failure if is_printing_rank() else None


def wait_for_all() -> None:
    """Wait for all processes at the end of a run (collective): rank 0 may have more to do."""
    if comm := existing_comm():
        comm.barrier()


def close(code: int) -> None:
    """Finish communication and end the process with this exit code (collective)."""
    if comm := existing_comm():
        comm.close(code)
