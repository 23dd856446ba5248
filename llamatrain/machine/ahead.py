"""Kernels that the cache does not have yet are compiled by other processes: side by side, and their memory is given back.

A compiler at work takes some 140 MB, which a process never returns; here it would stand beside the model for the whole run.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path

from llamatrain.machine.jit import PACKAGE, Entry, cache_folder, compiler
from llamatrain.machine.units import cores

NONE = subprocess.DEVNULL
TEAMS = {"llamatrain.machine.threads:_alone": 1, "llamatrain.machine.threads:_together": 2}  # what runs tables, and for how many


def compile_ahead(entries: Iterable[Entry], threads: int) -> None:
    """Have the cache filled with what it lacks for these to be run. What fails is left to whoever needs it."""
    folder = cache_folder()
    if folder is None or not sys.executable:
        return
    team = next(name for name, most in TEAMS.items() if min(threads, 2) == most)
    names = {f"{entry.body.__module__}:{entry.name}" for entry in entries if "compiled" not in vars(entry)}
    missing = sorted(name for name in {team, *names} if name.startswith("llamatrain.") and not _there(folder, name))
    if not missing:
        return
    compiler.announce(folder)
    start, workers = time.perf_counter(), min(cores(), len(missing))
    _run([missing[first::workers] for first in range(workers)])
    compiler.compiled += sum(_there(folder, name) for name in missing)
    compiler.seconds += time.perf_counter() - start


def _there(folder: Path, name: str) -> bool:
    """Whether Numba has kept the function of this name."""
    module, _, function = name.rpartition(":")
    return any(folder.glob(f"*/{module.rpartition('.')[2]}.{function}-*.nbc"))


def _run(shares: Sequence[Sequence[str]]) -> None:
    path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
    started: list[subprocess.Popen[bytes]] = []
    with contextlib.suppress(OSError):  # no process can be started: then it is done here
        try:
            for share in shares:
                words = [sys.executable, "-m", "llamatrain.machine.ahead", *share]
                env = os.environ | {"PYTHONPATH": path}
                started.append(subprocess.Popen(words, env=env, stdin=NONE, stdout=NONE, stderr=NONE))
            for process in started:
                process.wait()
        finally:
            for process in started:
                process.kill()
                process.wait()


def main(names: Sequence[str]) -> None:
    from llamatrain.machine import threads

    compiler.say = lambda line: None
    for name in names:
        module, _, function = name.rpartition(":")
        if name in TEAMS:
            threads.runner(TEAMS[name])
        else:
            assert getattr(import_module(module), function).compiled


if __name__ == "__main__":
    main(sys.argv[1:])
