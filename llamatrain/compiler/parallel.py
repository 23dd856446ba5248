"""Compiles kernels in worker processes: several at a time, and their memory is returned to the system.

A compiler takes about 140 MB, which a process never returns; in this process it would occupy memory next to
the model for the whole run. Workers receive names one by one and send the code back to this process, which
saves it.
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
from llamatrain.platform.locks import lock
from llamatrain.platform.terminal import progress_bar
from llamatrain.platform.threads import start_thread

PIPE, NONE = subprocess.PIPE, subprocess.DEVNULL
SIZES = struct.Struct("<qq")  # the sizes of a name and its file, sent first

results_lock = threading.Lock()


def precompile(needed: Iterable[Compilable]) -> None:
    """Compile missing functions, and all others with them, so that later commands do not wait.

    If the result cannot be saved, only what is needed is compiled. What fails is left to its first use.
    """
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
    """Return the address of a function, compiled by a worker or, if that fails, by this process."""
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
    """Let one process compile at a time; processes that wait find what it saved."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            if code_cache.store.folder and not code_cache.store.problem:
                stack.enter_context(lock(code_cache.store.folder))
        yield


def _run_workers(names: Sequence[str], workers: int) -> int:
    """Compile functions in worker processes and return their number."""
    pending: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        pending.put(name)
    processes: list[subprocess.Popen[bytes]] = []
    compiled = list[str]()
    with (
        contextlib.suppress(OSError),
        progress_bar("compiling kernels", total=len(names), unit="kernel") as progress,
    ):  # otherwise this process compiles
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
    """Send names to a worker one by one, until none is left or it has ended."""
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
    """Yield the results that arrived completely."""
    while len(head := stream.read(SIZES.size)) == SIZES.size:
        name_size, file_size = SIZES.unpack(head)
        name, file = stream.read(name_size).decode(), stream.read(file_size)
        if len(file) < file_size:
            return
        yield name, file


# ---- the process that compiles ------------------------------------


def _read_names() -> "queue.SimpleQueue[str]":
    """Return a queue of names from standard input.

    When the parent ends, the stream ends and this process exits.
    """
    names: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            names.put(line.strip())
        os._exit(1)

    start_thread(threading.Thread(target=listen, daemon=True))
    return names


def main() -> None:
    """Compile the functions that standard input names (the worker process)."""
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # other output must not mix with the results
        names = _read_names()
        while True:
            module, _, name = names.get().rpartition(":")
            object_name, facts, code = compile_function(getattr(import_module(module), name))
            _send(out, object_name, seal(facts, code))


if __name__ == "__main__":
    main()
