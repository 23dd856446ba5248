"""Whole runs of the program, as its users have them: in this process, or in one of their own where signals and memory matter."""

import io
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import llamatrain
from llamatrain.cli.main import main
from llamatrain.gguf.reader import open_gguf

ROOT = Path(llamatrain.__file__).resolve().parent.parent
PROGRAM = [sys.executable, "-c", "from llamatrain.__main__ import main; main()"]

TINY = ("--vocab-size", "bytes", "--embd", 32, "--head", 4, "--layer", 2, "--ff", 64, "--precision", "f32")
Argument = str | int | float | Path


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error:")]


def run(*arguments: Argument) -> Done:
    """The command in this process."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    words = ["llamatrain", *map(str, arguments)]
    with (
        patch.object(sys, "argv", words),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        main()
    code = end.value.code
    return Done(
        code if isinstance(code, int) else 1, *(stream.buffer.getvalue().decode() for stream in (out, err))
    )


def ran(*arguments: Argument) -> Done:
    """A run that must succeed."""
    done = run(*arguments)
    assert done.code == 0, done.err
    return done


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **more}


@contextmanager
def started(*arguments: Argument, **settings: Any) -> Iterator[subprocess.Popen[str]]:
    """The command in a process of its own, which does not outlive the test."""
    settings = dict[str, Any](stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) | settings
    with subprocess.Popen([*PROGRAM, *map(str, arguments)], text=True, **settings) as process:
        try:
            yield process
        finally:
            process.kill()


def finished(process: subprocess.Popen[str], seconds: float = 180) -> Done:
    out, err = process.communicate(timeout=seconds)
    return Done(process.returncode, out or "", err or "")


def ran_apart(*arguments: Argument) -> Done:
    """A run that must succeed, in a process of its own: `--memory` includes what earlier tests left in this one."""
    with started(*arguments) as process:
        done = finished(process)
    assert done.code == 0, done.err
    return done


def until(
    condition: Callable[[], bool], process: subprocess.Popen[str] | None = None, seconds: float = 180
) -> None:
    """Wait for something that a run does; not longer than the run lives."""
    end = time.monotonic() + seconds
    while not condition():
        if process is not None and process.poll() is not None:
            return
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.001)


# ---- what a run leaves -----------------------------------------------------


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps(folder: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(folder) if "loss" in line]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in steps(folder)]


def lines(folder: Path) -> int:
    """How many lines of metrics there are by now."""
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def timeless(folder: Path) -> list[dict[str, Any]]:
    """The metrics, without what no two runs share."""
    return [{key: value for key, value in line.items() if "second" not in key} for line in metrics(folder)]


def tensors(path: Path) -> dict[str, np.ndarray]:
    """The float32 tensors of a file."""
    return {
        name: tensor.raw.view(np.float32).reshape(tensor.shape)
        for name, tensor in open_gguf(path).tensors.items()
    }


def same_bits(one: Path, other: Path) -> None:
    """Two models have the same tensors, bit for bit."""
    left, right = tensors(one), tensors(other)
    assert left.keys() == right.keys()
    different = [name for name in left if left[name].tobytes() != right[name].tobytes()]
    assert not different, f"{len(different)} of {len(left)} tensors differ: {different[:3]}"


# ---- what runs are made of -------------------------------------------------


def text(size: int, seed: int = 1) -> str:
    """Something to learn: words that follow each other at random."""
    chance = random.Random(seed)
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(1, 8))) for _ in range(40)]
    made = ""
    while len(made) < size:
        made += " ".join(chance.choices(words, k=9)) + ".\n"
    return made[:size]


def text_file(folder: Path, size: int = 6016, seed: int = 1) -> Path:
    """By itself a whole number of rows of 32 bytes."""
    path = folder / "text.txt"
    path.write_text(text(size, seed))
    return path


def pairs_file(folder: Path, count: int = 60, seed: int = 1) -> Path:
    """Prompts and answers of 3 to 25 tokens together, as bytes with both ends."""
    path, random = folder / "pairs.jsonl", np.random.default_rng(seed)
    pairs = (random.integers(1, (8, 16)) for _ in range(count))
    lines = (
        {"prompt": "ab?cdefg"[:ask], "completion": text(int(tell), number)}
        for number, (ask, tell) in enumerate(pairs)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def rows(count: int, *arguments: Argument) -> list[dict[str, np.ndarray]]:
    """The rows that `preview` shows."""
    done = ran("preview", "--json", "-n", count, *arguments)
    shown = [json.loads(line) for line in done.out.splitlines()]
    assert len(shown) == count
    return [{name: np.array(values) for name, values in row.items()} for row in shown]
