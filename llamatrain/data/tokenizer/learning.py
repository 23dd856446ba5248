"""Has the merges of a vocabulary learned by a process of its own, whose memory goes with it, and shows how far it is."""

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from llamatrain.data.tokenizer import learner
from llamatrain.errors import DataError
from llamatrain.machine.terminal import bar


def merges(texts: Iterable[str], size: int, pattern: str, alphabet: list[str]) -> list[list[str]]:
    """What `learner.merges` gives, by a child; where no process can be started, by this one."""
    try:
        if not sys.executable:
            raise OSError
        child = subprocess.Popen(
            [sys.executable, "-P", str(Path(learner.__file__))],  # -P: this folder's modules shadow nothing there
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return learner.merges(texts, size, pattern, alphabet)
    with ended(child), bar("learning a vocabulary", unit="B", unit_scale=True) as told:
        with suppress(BrokenPipeError):  # what it has to say of that is read below
            send(child, json.dumps({"size": size, "pattern": pattern, "alphabet": alphabet}).encode() + b"\n")
            for text in texts:
                raw = text.encode()
                send(child, learner.LENGTH.pack(len(raw)) + raw)
                told.update(len(raw))
            send(child, learner.END, last=True)
        told.set_description("learning a vocabulary, merging")
        return answer_of(child)


def send(child: "subprocess.Popen[bytes]", data: bytes, last: bool = False) -> None:
    """The stream stays open behind the last: it ends with this process, and the child with it."""
    assert child.stdin is not None
    child.stdin.write(data)
    if last:
        child.stdin.flush()


def answer_of(child: "subprocess.Popen[bytes]") -> list[list[str]]:
    assert child.stdout is not None
    said = child.stdout.read()
    try:
        answer: dict[str, Any] = json.loads(said)
    except ValueError:
        code = child.wait()
        how = f"signal {-code}, as where memory is short" if code < 0 else f"code {code}"
        answer = {"error": f"the process that learns ended with {how}"}
    if "error" in answer:
        raise DataError(f"no vocabulary could be learned: {answer['error']}")
    found: list[list[str]] = answer["merges"]
    return found


@contextmanager
def ended(child: "subprocess.Popen[bytes]") -> Iterator[None]:
    try:
        yield
    finally:
        child.kill()
        for pipe in (child.stdin, child.stdout):
            with suppress(OSError):  # what is left to write has no reader any more
                assert pipe is not None
                pipe.close()
        child.wait()
