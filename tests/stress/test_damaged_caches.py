"""The command with both caches damaged, from a seed: the same bits, a line that says so, and a next start that is quick."""

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from llamatrain.compiler.loader import is_library
from llamatrain.compiler.store import MAGIC
from tests.helpers.warm_cache import warm, without_libraries

CHEAP = (
    "elementwise.fill_flat",
    "norm.add_rows",
    "optimizer.clip_by_norm",
    "elementwise.to_bf16_flat",
    "rows.take_rows",
    "reduce.add_up",
)
MODEL = ("--vocab-size", "bytes", "--embd", "32", "--head", "4", "--layer", "1", "--ctx", "48")
SMALL = (*MODEL, "--iters", "2", "--threads", "1", "--precision", "bf16")


def damages(chance: random.Random) -> list[Callable[[Path], object]]:
    def flipped(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)

    def replaced(make: Callable[[Path], object]) -> Callable[[Path], object]:
        return lambda path: (path.unlink(), make(path))

    return [
        flipped,
        lambda path: os.truncate(path, chance.randrange(path.stat().st_size)),
        lambda path: path.write_bytes(chance.randbytes(path.stat().st_size)),
        replaced(os.mkfifo),
        replaced(Path.mkdir),
        replaced(lambda path: path.symlink_to("/dev/zero")),
    ]


def test_damaged_caches_are_mended_by_the_run_that_finds_them(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    env = without_libraries(tmp_path / "cache")
    command = (
        sys.executable,
        "-m",
        "llamatrain",
        "from-scratch",
        "text.txt",
        *SMALL,
        "--out",
        "run",
        "--overwrite",
    )

    def result() -> tuple[bytes, str]:
        done = subprocess.run(
            command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300
        )
        return (tmp_path / "run" / "model.gguf").read_bytes(), done.stderr

    folder = warm(tmp_path / "cache")
    expected, _ = result()
    chance = random.Random(18)
    makers = damages(chance)
    chance.shuffle(makers)
    for name, damage in zip(CHEAP, makers, strict=True):
        (path,) = folder.glob(f"llamatrain.kernels.cpu.{name}-*")
        damage(path)
    (tokens,) = (tmp_path / "cache").rglob("tokens/*/tokens")
    makers[0](tokens)
    bits, said = result()
    assert bits == expected
    assert (
        said.count(f"compiling kernels again that were damaged in {folder}") == 1
        and said.count("the cached tokens are damaged; encoding the data again") == 1
    )
    bits, said = result()
    assert bits == expected and "again" not in said and "compil" not in said


def test_kernels_that_could_not_be_linked_are_linked_by_the_next_run(tmp_path: Path) -> None:
    """A full disk, or no linker yet: what loads an object file is LLVM, with 48 MB for every run."""
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    env, folder = without_libraries(tmp_path / "cache"), warm(tmp_path / "cache")
    command = (
        sys.executable,
        "-m",
        "llamatrain",
        "from-scratch",
        "text.txt",
        *SMALL,
        "--out",
        "run",
        "--overwrite",
    )

    def result(**more: str) -> tuple[bytes, str]:
        done = subprocess.run(
            command, env=env | more, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300
        )
        return (tmp_path / "run" / "model.gguf").read_bytes(), done.stderr

    def unlinked() -> list[str]:
        start = len(MAGIC) + hashlib.sha256().digest_size
        return [
            path.name for path in folder.glob("llamatrain.*") if not is_library(path.read_bytes()[start:])
        ]

    expected, _ = result()
    assert not unlinked()
    for name in CHEAP[:2]:
        next(folder.glob(f"llamatrain.kernels.cpu.{name}-*")).unlink()
    bits, said = result(PATH="/nowhere")
    assert bits == expected and "compiling" in said and len(unlinked()) == 2
    bits, said = result()
    assert (
        bits == expected
        and said.count("linking kernels that could not be linked when they were compiled") == 1
    )
    assert not unlinked() and "compiling" not in said
    bits, said = result()
    assert bits == expected and "link" not in said
