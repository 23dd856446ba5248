"""Programs of several processes that MPI joins: started by the `mpiexec` of the interpreter's own environment."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cli import PROGRAM, Argument, Done, environment

BESIDE = Path(sys.executable).parent / "mpiexec"
MPIEXEC = str(BESIDE) if BESIDE.exists() else shutil.which("mpiexec")
WITHOUT = next(
    (
        f"{name} is not installed"
        for name, there in (("mpi4py", find_spec("mpi4py")), ("mpiexec", MPIEXEC))
        if not there
    ),
    "",
)
needs_mpi = pytest.mark.skipif(bool(WITHOUT), reason=WITHOUT or "it is there")
SETTINGS = {
    "OMP_NUM_THREADS": "1",  # numpy's and the compiler's own: ranks share the processors
    "NUMBA_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "",  # a line is one write, and stays whole among others
}
PREFIXES = "PMI", "OMPI_", "MPI_", "HYDI_", "SLURM_"  # what tells a process that it was launched

Started = subprocess.Popen[str]


def alone(**more: str) -> dict[str, str]:
    """The environment of a process that nobody has launched with others."""
    return {name: value for name, value in environment().items() if not name.startswith(PREFIXES)} | more


@contextmanager
def launched(
    ranks: int, *words: Argument, options: tuple[Argument, ...] = (), **settings: Any
) -> Iterator[subprocess.Popen[str]]:
    """`mpiexec -n RANKS python WORDS`, in a group of its own which ends with the test; `env` is added to the environment."""
    command = [MPIEXEC, *options, "-n", ranks, sys.executable, *words]
    env = alone(**{**SETTINGS, **settings.pop("env", {})})
    settings = (
        dict[str, Any](stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env=env)
        | settings
    )
    settings |= {"preexec_fn": goes_with_parent}
    words = [str(each) for each in command]
    with subprocess.Popen(words, text=True, start_new_session=True, **settings) as process:
        try:
            yield process
        finally:
            for each in (*descendants(process.pid), process.pid):
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)


def goes_with_parent() -> None:
    """Also where the tests are killed; the launcher takes its ranks with it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def ended(process: Started, seconds: float = 60) -> Done:
    out, err = process.communicate(timeout=seconds)
    return Done(process.returncode, out or "", err or "")


def python(ranks: int, *words: Argument, seconds: float = 60, **settings: Any) -> Done:
    """A program of Python's on so many ranks: what mpiexec ends with, and what came out of all.

    The launcher itself may hang when all ranks have ended: then it is asked once more.
    """
    with launched(ranks, *words, **settings) as process:
        try:
            return ended(process, seconds)
        except subprocess.TimeoutExpired:
            if any(rank_of(each) is not None for each in descendants(process.pid)):
                raise
    with launched(ranks, *words, **settings) as process:
        return ended(process, seconds)


def command(ranks: int, *words: Argument, seconds: float = 60, **settings: Any) -> Done:
    """The command `llamatrain` on so many ranks."""
    return python(ranks, *PROGRAM[1:], *words, seconds=seconds, **settings)


def ran(ranks: int, *words: Argument, **settings: Any) -> Done:
    """One that must succeed."""
    done = command(ranks, *words, **settings)
    assert done.code == 0, done.err
    return done


def descendants(pid: int) -> list[int]:
    """The processes that this one has started, and those that they have, the last first."""
    found = list[int]()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, path.read_text().split()):
                found += [*descendants(child), child]
    return found


def rank_of(pid: int) -> int | None:
    """Of a process that mpiexec has started."""
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"PMI_RANK="):
                return int(entry.removeprefix(b"PMI_RANK="))
    return None


def by_rank(process: Started) -> dict[int, int]:
    """The processes of the ranks that are there by now: those that started no other of the kind."""
    found = [(rank, pid) for pid in descendants(process.pid) if (rank := rank_of(pid)) is not None]
    return dict(found)  # of several the last, which is the outermost
