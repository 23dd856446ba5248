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

from llamatrain.compiler.cache import code_cache, compile_function, find_missing, has_compiler
from llamatrain.compiler.declare import Compilable
from llamatrain.compiler.inventory import list_compilables
from llamatrain.compiler.prebuilt import PACKAGE
from llamatrain.compiler.store import seal
from llamatrain.distributed.cores import count_cores
from llamatrain.distributed.launcher import env_without_launcher
from llamatrain.platform.temp_files import lock
from llamatrain.platform.terminal import progress_bar
from llamatrain.platform.threads import start_thread

PIPE, NONE = subprocess.PIPE, subprocess.DEVNULL
SIZES = struct.Struct("<qq")  # of a name and its file, before they come

results_lock = threading.Lock()


def precompile(needed: Iterable[Compilable]) -> None:
    """Have these compiled if they were not before, and with them all others: who compiles waits once, and no later command does.
    What cannot be kept is compiled only where it is needed. What fails is left to whoever needs it."""
    if code_cache.lookup_only or not has_compiler() or not sys.executable:
        return
    needed = list(needed)
    if not _missing_names(needed):
        return
    code_cache.announce()
    if code_cache.store.folder and not code_cache.store.problem:
        needed += list_compilables()
    with _compile_lock():
        if names := _missing_names(needed):
            start = time.perf_counter()
            code_cache.add_to_report(
                _run_workers(names, min(count_cores(), len(names))), time.perf_counter() - start
            )


def find_or_compile(declared: Compilable) -> int:
    """Where it is; what must be compiled, and no other process can compile, is compiled here."""
    precompile([declared])
    return code_cache.get_address(declared)


def _missing_names(needed: Sequence[Compilable]) -> list[str]:
    return [
        function.qualified_name
        for function in find_missing(needed)
        if function.qualified_name.startswith("llamatrain.")
    ]


@contextlib.contextmanager
def _compile_lock() -> Iterator[None]:
    """Of processes that lack the same, one compiles at a time, and those behind it find what it kept."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            if code_cache.store.folder and not code_cache.store.problem:
                stack.enter_context(lock(code_cache.store.folder))
        yield


def _run_workers(names: Sequence[str], workers: int) -> int:
    """How many functions came of it."""
    pending: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        pending.put(name)
    processes: list[subprocess.Popen[bytes]] = []
    compiled = list[str]()
    with (
        contextlib.suppress(OSError),
        progress_bar("compiling kernels", total=len(names), unit="kernel") as progress,
    ):  # else it is done here
        try:
            for _ in range(workers):
                command = [sys.executable, "-m", "llamatrain.compiler.parallel"]
                processes.append(
                    subprocess.Popen(command, env=_environment(), stdin=PIPE, stdout=PIPE, stderr=NONE)
                )
            readers = [
                threading.Thread(target=_feed_worker, args=[one, pending, compiled, progress], daemon=True)
                for one in processes
            ]
            for reader in readers:
                start_thread(reader)
            for reader in readers:
                reader.join()
        finally:
            for process in processes:
                process.kill()
                process.wait()
                for pipe in (process.stdin, process.stdout):
                    with contextlib.suppress(OSError):
                        assert pipe
                        pipe.close()
    return len(compiled)


def _feed_worker(
    process: "subprocess.Popen[bytes]", pending: "queue.SimpleQueue[str]", compiled: list[str], progress: Any
) -> None:
    """Give a process one name after the other, until none is left or it has ended."""
    assert process.stdin and process.stdout
    with contextlib.suppress(OSError, queue.Empty):
        while True:
            process.stdin.write(pending.get_nowait().encode() + b"\n")
            process.stdin.flush()
            for name, file in _read_results(process.stdout):
                with results_lock:
                    code_cache.save(name, file)
                    compiled.append(name)
                    progress.update()
                break
            else:
                return


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
    return {**env_without_launcher(), "PYTHONPATH": path}


def _send(stream: IO[bytes], name: str, file: bytes) -> None:
    raw = name.encode()
    stream.write(SIZES.pack(len(raw), len(file)) + raw + file)
    stream.flush()


def _read_results(stream: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    """What was sent whole."""
    while len(head := stream.read(SIZES.size)) == SIZES.size:
        name_size, file_size = SIZES.unpack(head)
        name, file = stream.read(name_size).decode(), stream.read(file_size)
        if len(file) < file_size:
            return
        yield name, file


# ---- the process that compiles ------------------------------------


def _read_names() -> "queue.SimpleQueue[str]":
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
        names = _read_names()
        while True:
            module, _, name = names.get().rpartition(":")
            object_name, facts, code = compile_function(getattr(import_module(module), name))
            _send(out, object_name, seal(facts, code))


if __name__ == "__main__":
    main()
