"""A run whose checkpoint was written by kernels for other processors: it goes on, and says what changed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain.checkpoints.checkpoint import KERNELS
from llamatrain.checkpoints.filenames import LATEST
from llamatrain.engine.device import kernel_class
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.values import string
from tests.helpers.cli import TINY, Argument, losses, ran, text_file
from tests.helpers.lora_runs import base
from tests.helpers.small_models import small
from tests.helpers.tiny_checkpoint import forge

STEPS: tuple[Argument, ...] = (
    "--batch",
    2,
    "--ctx",
    32,
    "--seed",
    1,
    "--schedule",
    "constant",
    "--kernels",
    "reference",
)
EXTRA = "training.extra"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path)
    base(tmp_path / "base.gguf", small(), "Q8_0")
    return tmp_path


def stored(path: Path) -> dict[str, Any]:
    return dict(json.loads(open_gguf(path).get_value(EXTRA, str)))


def move_to(folder: Path, processors: str) -> None:
    """Make the checkpoints ones that were written on other processors."""
    for path in folder.glob("checkpoint-*.gguf"):
        moved = {EXTRA: string(json.dumps(stored(path) | {KERNELS: processors}))}
        forge(path, folder / "moved", moved).replace(path)


@pytest.mark.parametrize("command", ["from-scratch", "finetune"])
@pytest.mark.parametrize("processors", ["armv8.2-dotprod", "x86-64-v4-bf16"])
def test_a_run_moves_to_other_processors_with_a_note(command: str, processors: str, place: Path) -> None:
    files: tuple[Argument, ...] = (
        ("text.txt", *TINY) if command == "from-scratch" else ("base.gguf", "text.txt")
    )
    for out, iters in (("whole", 4), ("parts", 2)):
        ran(command, *files, *STEPS, "--precision", "f32", "--iters", iters, "--out", out)
    here = kernel_class("reference")
    assert stored(place / "parts" / LATEST)[KERNELS] == here
    move_to(place / "parts", processors)
    said = ran(command, "--resume", "parts", "--iters", 4).err
    assert f"the kernels are now those for {here} (they were for {processors})" in said
    assert "results will differ slightly from those of an uninterrupted run" in said
    np.testing.assert_allclose(losses(place / "parts"), losses(place / "whole"), rtol=1e-6)
    assert stored(place / "parts" / LATEST)[KERNELS] == here
    # Those who go on with this one are on the same processors.
    assert "the kernels are now" not in ran(command, "--resume", "parts", "--iters", 5).err


def test_kernels_without_a_compiler_are_another_class(place: Path) -> None:
    ran("from-scratch", "text.txt", *TINY, *STEPS, "--iters", 1, "--out", "run")
    move_to(place / "run", kernel_class("cpu"))
    said = ran("from-scratch", "--resume", "run", "--iters", 2).err
    moved = f"the kernels are now those for numpy (they were for {kernel_class('cpu')})"
    assert (moved in said) == (kernel_class("cpu") != "numpy")
