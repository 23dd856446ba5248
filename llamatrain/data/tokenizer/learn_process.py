"""Learns a vocabulary in a separate process, whose memory is released when it ends.

Its input is the options as a line of JSON and texts, each after its length, up to a length of -1; its output
is a line of JSON. The process shows its own progress.
"""

import json
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO

import llamatrain
from llamatrain.compiler.cache import code_cache
from llamatrain.data.tokenizer import new_vocab
from llamatrain.data.tokenizer.tokenizer import to_bytes
from llamatrain.distributed.launcher import env_without_launcher
from llamatrain.errors import DataError
from llamatrain.platform.terminal import is_verbose, show_log
from llamatrain.platform.threads import start_thread

LENGTH = struct.Struct("<q")
END = LENGTH.pack(-1)


def learn_merges(texts: Iterable[str | bytes], size: int) -> list[tuple[str, str]]:
    """Learn merges as `new_vocab.learn_merges`, which is called directly if no process can be started."""
    new_vocab.check_size(size)
    try:
        child = start_process()
    except OSError:
        return new_vocab.learn_merges(texts, size)
    with ending_process(child):
        with suppress(BrokenPipeError):  # its answer, read below, tells why
            send(child, json.dumps({"size": size, "shown": is_verbose()}).encode() + b"\n")
            for text in map(to_bytes, texts):
                send(child, LENGTH.pack(len(text)) + text)
            send(child, END)
        answer = read_answer(child)
    code_cache.announced = code_cache.announced or answer["compiled"]
    return [(left, right) for left, right in answer["merges"]]


def start_process() -> "subprocess.Popen[bytes]":
    """Start the process that learns."""
    if not sys.executable:
        raise OSError
    package = str(Path(llamatrain.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "llamatrain.data.tokenizer.learn_process"]
    return subprocess.Popen(
        command,
        env={**env_without_launcher(), "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def send(child: "subprocess.Popen[bytes]", data: bytes) -> None:
    """Write data to the process. Its input stays open: it ends with this process, and the child with it."""
    assert child.stdin is not None
    child.stdin.write(data)
    child.stdin.flush()


def read_answer(child: "subprocess.Popen[bytes]") -> dict[str, Any]:
    """Read the answer of the process; raise DataError if it failed."""
    assert child.stdout is not None
    output = child.stdout.read()
    try:
        answer: dict[str, Any] = json.loads(output)
    except ValueError:
        code = child.wait()
        ending = f"signal {-code}; memory may be short" if code < 0 else f"exit code {code}"
        answer = {"error": f"no vocabulary could be learned: its process ended with {ending}"}
    if "error" in answer:
        raise DataError(answer["error"], code=answer.get("code", "vocabulary-not-learned"))
    return answer


@contextmanager
def ending_process(child: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Kill the process at the end of a block."""
    try:
        yield
    finally:
        child.kill()
        for pipe in (child.stdin, child.stdout):
            with suppress(OSError):  # unwritten data has no reader
                assert pipe is not None
                pipe.close()
        child.wait()


# ---- the child process -----------------------------------------------------


def receive_texts(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the texts up to the end mark; exit if the parent died."""
    while (length := LENGTH.unpack(read_exactly(stream, LENGTH.size))[0]) >= 0:
        yield read_exactly(stream, length)
    # No more input follows: exit with the parent.
    start_thread(threading.Thread(target=read_exactly, args=[stream, 1], daemon=True))


def read_exactly(stream: BinaryIO, size: int) -> bytes:
    """Read `size` bytes; exit if the stream ends."""
    data = stream.read(size)
    if len(data) < size:
        os._exit(1)
    return data


def main() -> None:
    """Learn a vocabulary from standard input and print its merges."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    source = sys.stdin.buffer
    options: dict[str, Any] = json.loads(source.readline())
    with show_log() if options["shown"] else nullcontext():
        try:
            merges = new_vocab.learn_merges(receive_texts(source), options["size"])
            answer: dict[str, Any] = {"merges": merges, "compiled": code_cache.announced}
        except MemoryError:
            answer = {"error": "no vocabulary could be learned: not enough memory"}
        except DataError as error:
            answer = {"error": str(error), "code": error.code}
        except Exception as error:  # the parent reports every error
            answer = {
                "error": f"no vocabulary could be learned: "
                f"{' '.join(str(error).split())[:300] or type(error).__name__}"
            }
    try:
        sys.stdout.write(json.dumps(answer))
        sys.stdout.flush()
    finally:
        os._exit(0)  # the waiting thread holds the stream


if __name__ == "__main__":
    main()
