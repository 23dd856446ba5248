"""Kernels that the cache does not have yet are compiled by other processes: side by side, and their memory is given back.

A compiler at work takes some 140 MB, which a process never returns; here it would stand beside the model for the whole run.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path

from llamatrain.machine.cachefolder import SWITCH, passing, wanted
from llamatrain.machine.entry import Deferred
from llamatrain.machine.jit import PACKAGE, cache_folder, cache_key, compiler, kept_of
from llamatrain.machine.temporary import removed
from llamatrain.machine.units import cores

NONE = subprocess.DEVNULL


def compile_ahead(needed: Iterable[Deferred]) -> None:
    """Have the cache filled with what it lacks of these. What fails is left to whoever needs it."""
    if cache_folder() is None or not sys.executable:
        return
    names = {each.where for each in needed if "compiled" not in vars(each)}
    missing = sorted(name for name in names if name.startswith("llamatrain.") and not _there(name))
    if not missing:
        return
    compiler.announce()
    start, workers = time.perf_counter(), min(cores(), len(missing))
    _run([missing[first::workers] for first in range(workers)])
    compiler.compiled += sum(map(_there, missing))
    compiler.seconds += time.perf_counter() - start


def _there(name: str) -> bool:
    """Whether Numba has kept the function of this name."""
    module, _, function = name.rpartition(":")
    return any(kept_of(module).glob(f"{module.rpartition('.')[2]}.{function}-*.nbc"))


def _run(shares: Sequence[Sequence[str]]) -> None:
    started: list[subprocess.Popen[bytes]] = []
    with contextlib.suppress(OSError):  # no process can be started: then it is done here
        try:
            for share in shares:
                words = [sys.executable, "-m", "llamatrain.machine.ahead", _elsewhere(), *share]
                started.append(subprocess.Popen(words, env=_environment(), stdin=subprocess.PIPE, stdout=NONE, stderr=NONE))
            for process in started:
                process.wait()
        finally:
            for process in started:
                process.kill()
                process.wait()
                assert process.stdin
                process.stdin.close()


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **({SWITCH: folder} if (folder := _elsewhere()) else {})}


def _elsewhere() -> str:
    """The folder that goes with the program, where kernels are kept for the run alone."""
    return "" if cache_folder() == wanted(cache_key()) else str(passing())


def _end_with_parent(folder: str) -> None:
    """Nothing is ever written to this process: its input ends when whoever started it does, however that was.

    What was to go with that goes now: the last to write to it may be this one."""

    def watch() -> None:
        os.read(0, 1)
        if folder:
            removed(Path(folder))
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(folder: str, *names: str) -> None:
    _end_with_parent(folder)
    for name in names:
        module, _, function = name.rpartition(":")
        getattr(import_module(module), function).build()


if __name__ == "__main__":
    main(*sys.argv[1:])
