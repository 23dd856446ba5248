"""Kernels that were not compiled before are compiled by other processes: side by side, and their memory is given back.

A compiler at work takes some 140 MB, which a process never returns; here it would stand beside the model for the whole run.
They send what they made to the one that asked, which keeps it; no two write, and what cannot be kept is there all the same.
"""

import contextlib
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from typing import IO

from llamatrain.machine.entry import Deferred
from llamatrain.machine.jit import compiler
from llamatrain.machine.kept import Shelf
from llamatrain.machine.native import PACKAGE
from llamatrain.machine.units import cores

PIPE, NONE = subprocess.PIPE, subprocess.DEVNULL
SIZES = struct.Struct("<qq")  # of a name and its file, before they come; no name says that no more will

turn = threading.Lock()


def compile_ahead(needed: Iterable[Deferred]) -> None:
    """Have these compiled, if they were not before. What fails is left to whoever needs it."""
    missing = sorted({each.where for each in needed if each.where.startswith("llamatrain.") and not each.ready()})
    if not missing or not sys.executable:
        return
    compiler.announce()
    start, workers = time.perf_counter(), min(cores(), len(missing))
    compiler.count(_run([missing[first::workers] for first in range(workers)]), time.perf_counter() - start)


def _run(shares: Sequence[Sequence[str]]) -> int:
    """How many functions came of it."""
    started: list[subprocess.Popen[bytes]] = []
    names = set[str]()
    with contextlib.suppress(OSError):  # no process can be started: then it is done here
        try:
            for share in shares:
                words = [sys.executable, "-m", "llamatrain.machine.ahead", *share]
                started.append(subprocess.Popen(words, env=_environment(), stdin=PIPE, stdout=PIPE, stderr=NONE))
            readers = [threading.Thread(target=_receive, args=[process, names], daemon=True) for process in started]
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join()
        finally:
            for process in started:
                process.kill()
                process.wait()
                for pipe in (process.stdin, process.stdout):
                    with contextlib.suppress(OSError):
                        assert pipe
                        pipe.close()
    return len(names)


def _receive(process: "subprocess.Popen[bytes]", names: set[str]) -> None:
    assert process.stdin and process.stdout
    with contextlib.suppress(OSError):  # it has ended: then it is done here
        for name, file in list(compiler.shelf.loose.items()):
            _send(process.stdin, name, file)
        _send(process.stdin, "", b"")
    for name, file in _received(process.stdout):
        names.add(name)
        with turn:
            compiler.keep(name, file)


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def _send(stream: IO[bytes], name: str, file: bytes) -> None:
    raw = name.encode()
    stream.write(SIZES.pack(len(raw), len(file)) + raw + file)
    stream.flush()


def _received(stream: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    """What was sent whole, up to the end that is said, or is one."""
    while len(head := stream.read(SIZES.size)) == SIZES.size:
        of_name, of_file = SIZES.unpack(head)
        name, file = stream.read(of_name).decode(), stream.read(of_file)
        if not name or len(file) < of_file:
            return
        yield name, file


# ---- the process that compiles ---------------------------------------------


class Sending(Shelf):
    """What is put there is sent."""

    def __init__(self, known: Shelf, stream: IO[bytes]) -> None:
        vars(self).update(vars(known))
        self.stream = stream

    def put(self, name: str, file: bytes) -> None:
        _send(self.stream, name, file)


def _end_with_parent() -> None:
    """Nothing more is ever said to this process: its input ends when whoever started it does, however that was."""

    def watch() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(*names: str) -> None:
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # whatever else is said is not for the one that listens
        compiler.shelf.loose |= dict(_received(sys.stdin.buffer))
        compiler.shelf = Sending(compiler.shelf, out)
        _end_with_parent()
        for name in names:
            module, _, function = name.rpartition(":")
            getattr(import_module(module), function).build()


if __name__ == "__main__":
    main(*sys.argv[1:])
