"""Initialization of MPI for the processes that a launcher started."""

import hashlib
import os
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from llamatrain import __version__
from llamatrain.distributed.launcher import LaunchInfo
from llamatrain.distributed.single import EXIT_RETRY, Comm, ExitStatus, SingleProcess
from llamatrain.distributed.stderr import print_error
from llamatrain.errors import UsageError
from llamatrain.platform.terminal import call_if_slow

PACKAGE = Path(__file__).resolve().parents[1]
EXTRA = "pip install 'llamatrain[mpi]'"
JOIN_TIMEOUT = 300.0  # seconds: on a cluster, all processes may read the program from one disk


def join(launch: LaunchInfo, failure: ExitStatus | None = None) -> Comm:
    """Join the other processes (collective); processes that failed before join as well, so that nobody waits."""
    if not launch.can_join:
        raise UsageError(
            f"{launch.description} but cannot find each other; start them with srun --mpi=pmix (or pmi2)",
            code="mpi-not-joined",
        )
    if find_spec("mpi4py") is None:
        if not launch.is_multi_process:
            return SingleProcess()
        raise UsageError(
            f"{launch.description} but mpi4py is not installed; run {EXTRA}", code="mpi4py-missing"
        )
    with limit_time(launch):
        mpi = start_mpi()
        if launch.is_multi_process and mpi.COMM_WORLD.size == 1:
            raise UsageError(
                f"{launch.description} but did not find each other: the launcher belongs to another "
                f"MPI than mpi4py; use the mpiexec of {EXTRA}",
                code="mpi-mismatch",
            )
        from llamatrain.distributed.mpi import MpiComm

        comm = MpiComm(failure)
        comm.assert_equal_on_all({"version": __version__, "source code": hash_sources()})
        return comm


def hash_sources() -> str:
    """Return a hash of all sources of the package."""
    key = hashlib.sha256()
    for source in sorted(PACKAGE.rglob("*.py")):
        key.update(source.relative_to(PACKAGE).as_posix().encode() + b"\0" + source.read_bytes() + b"\0")
    return key.hexdigest()[:16]


def start_mpi() -> ModuleType:
    """Import and initialize MPI for use by several threads."""
    import mpi4py

    mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    try:
        from mpi4py import MPI

        if not MPI.Is_initialized():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
    except (ImportError, RuntimeError, OSError) as error:  # MPI's own exceptions are RuntimeErrors
        reason = " ".join(str(error).split())
        raise UsageError(
            f"MPI failed to start: {reason}; install one with {EXTRA}, or see the manual of the cluster",
            code="mpi-init-failed",
        ) from error
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise UsageError(
            "this MPI does not support threads (MPI_THREAD_MULTIPLE), which training needs; "
            "use another build of MPI",
            code="mpi-single-threaded",
        )
    return MPI


def limit_time(launch: LaunchInfo) -> AbstractContextManager[None]:
    """Return a context that ends the process if initialization takes too long: MPI itself waits forever."""

    def stop() -> None:
        """Report the timeout and exit."""
        print_error(f"rank {launch.rank}: the other processes did not start within {JOIN_TIMEOUT:g} s")
        os._exit(EXIT_RETRY)

    return call_if_slow(JOIN_TIMEOUT, stop)
