"""Kernels that were not compiled before are compiled by other processes: side by side, and their memory is given back.

A compiler at work takes some 140 MB, which a process never returns; here it would stand beside the model for the whole run.
They are told what to compile, one after the other, and send what they made to the one that asked, which keeps it.
"""

import contextlib
import os
import queue
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from typing import IO, Any

from llamatrain.compiler.cache import code, compiled, compiles, missing
from llamatrain.compiler.declare import Compilable
from llamatrain.compiler.inventory import declared
from llamatrain.compiler.prebuilt import PACKAGE
from llamatrain.compiler.store import sealed
from llamatrain.distributed.cores import cores
from llamatrain.distributed.launcher import unlaunched
from llamatrain.platform.temp_files import lock
from llamatrain.platform.terminal import progress_bar
from llamatrain.platform.threads import start_thread

PIPE, NONE = subprocess.PIPE, subprocess.DEVNULL
SIZES = struct.Struct("<qq")  # of a name and its file, before they come

turn = threading.Lock()


def compile_ahead(needed: Iterable[Compilable]) -> None:
    """Have these compiled if they were not before, and with them all others: who compiles waits once, and no later command does.
    What cannot be kept is compiled only where it is needed. What fails is left to whoever needs it."""
    if code.idle or not compiles() or not sys.executable:
        return
    needed = list(needed)
    if not _names(needed):
        return
    code.announce()
    if code.shelf.folder and not code.shelf.trouble:
        needed += declared()
    with _only_one():
        if names := _names(needed):
            start = time.perf_counter()
            code.count(_run(names, min(cores(), len(names))), time.perf_counter() - start)


def address_of(declared: Compilable) -> int:
    """Where it is; what must be compiled, and no other process can compile, is compiled here."""
    compile_ahead([declared])
    return code.address(declared)


def _names(needed: Sequence[Compilable]) -> list[str]:
    return [each.where for each in missing(needed) if each.where.startswith("llamatrain.")]


@contextlib.contextmanager
def _only_one() -> Iterator[None]:
    """Of processes that lack the same, one compiles at a time, and those behind it find what it kept."""
    with contextlib.ExitStack() as leaving:
        with contextlib.suppress(OSError):
            if code.shelf.folder and not code.shelf.trouble:
                leaving.enter_context(lock(code.shelf.folder))
        yield


def _run(names: Sequence[str], workers: int) -> int:
    """How many functions came of it."""
    left: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        left.put(name)
    started: list[subprocess.Popen[bytes]] = []
    made = list[str]()
    with (
        contextlib.suppress(OSError),
        progress_bar("compiling kernels", total=len(names), unit="kernel") as told,
    ):  # else it is done here
        try:
            for _ in range(workers):
                words = [sys.executable, "-m", "llamatrain.compiler.parallel"]
                started.append(
                    subprocess.Popen(words, env=_environment(), stdin=PIPE, stdout=PIPE, stderr=NONE)
                )
            readers = [
                threading.Thread(target=_served, args=[one, left, made, told], daemon=True) for one in started
            ]
            for reader in readers:
                start_thread(reader)
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
    return len(made)


def _served(
    process: "subprocess.Popen[bytes]", left: "queue.SimpleQueue[str]", made: list[str], told: Any
) -> None:
    """Give a process one name after the other, until none is left or it has ended."""
    assert process.stdin and process.stdout
    with contextlib.suppress(OSError, queue.Empty):
        while True:
            process.stdin.write(left.get_nowait().encode() + b"\n")
            process.stdin.flush()
            for name, file in _received(process.stdout):
                with turn:
                    code.keep(name, file)
                    made.append(name)
                    told.update()
                break
            else:
                return


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
    return {**unlaunched(), "PYTHONPATH": path}


def _send(stream: IO[bytes], name: str, file: bytes) -> None:
    raw = name.encode()
    stream.write(SIZES.pack(len(raw), len(file)) + raw + file)
    stream.flush()


def _received(stream: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    """What was sent whole."""
    while len(head := stream.read(SIZES.size)) == SIZES.size:
        of_name, of_file = SIZES.unpack(head)
        name, file = stream.read(of_name).decode(), stream.read(of_file)
        if len(file) < of_file:
            return
        yield name, file


# ---- the process that compiles ------------------------------------


def _asked() -> "queue.SimpleQueue[str]":
    """The names that come. The stream ends when whoever started this process does, however that was, and so does this."""
    names: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            names.put(line.strip())
        os._exit(1)

    start_thread(threading.Thread(target=listen, daemon=True))
    return names


def main() -> None:
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # whatever else is said is not for the one that listens
        names = _asked()
        while True:
            module, _, name = names.get().rpartition(":")
            named, facts, made = compiled(getattr(import_module(module), name))
            _send(out, named, sealed(facts, made))


if __name__ == "__main__":
    main()
