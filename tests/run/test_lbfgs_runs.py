"""Runs of L-BFGS: in which precision, on which rows, and how they end."""

import math
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain.data.batches import Batch
from llamatrain.train.state import RunState
from llamatrain.train.step import StepResult, StepRunner
from tests.helpers.cli import TINY, Argument, losses, ran, run, steps, text_file

SINE = (
    "--loss",
    "squared-error",
    "--vocab-size",
    8,
    "--embd",
    16,
    "--head",
    2,
    "--layer",
    1,
    "--ff",
    32,
    "--ctx",
    16,
)
LBFGS = ("--optimizer", "lbfgs", "--sample-every", 0)


def precision_of(folder: Path) -> str:
    return str(tomllib.loads((folder / "config.toml").read_text())["precision"])


def progress(folder: Path) -> int:
    """The most evaluations that a step took."""
    counts = [line["evaluations"] for line in steps(folder)]
    return int(np.diff(counts).max())


def test_float32_is_the_default(tmp_path: Path) -> None:
    """However fast the processor is at bf16."""
    ran("from-scratch", *SINE, *LBFGS, "--iters", 1, "--out", tmp_path / "run")
    assert precision_of(tmp_path / "run") == "f32"


def test_rounded_losses_are_warned_of(tmp_path: Path) -> None:
    done = ran("from-scratch", *SINE, *LBFGS, "--precision", "bf16", "--iters", 1, "--out", tmp_path / "run")
    assert "note: --optimizer lbfgs stops early in bf16" in done.err and "--precision f32" in done.err
    assert precision_of(tmp_path / "run") == "bf16"


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_a_descent_without_progress_ends_and_says_why(precision: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = ran(
        "from-scratch",
        *SINE,
        *LBFGS,
        "--precision",
        precision,
        "--batch",
        1,
        "--iters",
        3000,
        "--out",
        folder,
    )
    assert "stopped: stuck: the loss of " in done.err or "stopped: converged: " in done.err
    assert len(steps(folder)) < 3000 and progress(folder) < 20
    assert (folder / "model.gguf").exists()
    assert losses(folder)[-1] < losses(folder)[0]


def test_a_third_of_the_evaluations_of_adamw(tmp_path: Path) -> None:
    """On the sine with squared error; AdamW may take the best of three rates."""
    reached = []
    for rate in (3e-3, 1e-2, 3e-2):
        given = ("--lr", rate, "--weight-decay", 0, "--sample-every", 0, "--precision", "f32", "--iters", 240)
        ran("from-scratch", *SINE, *given, "--out", tmp_path / f"adamw-{rate}")
        reached.append(losses(tmp_path / f"adamw-{rate}")[-1])
    ran("from-scratch", *SINE, *LBFGS, "--iters", 80, "--out", tmp_path / "lbfgs")
    first = next(line for line in steps(tmp_path / "lbfgs") if line["loss"] <= min(reached))
    assert 3 * first["evaluations"] <= 240


# ---- new rows --------------------------------------------------------------


def watched(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """The rows of each step."""
    seen, take = list[Batch](), StepRunner.run

    def noted(stepping: StepRunner, state: RunState, batches: list[Batch], *more: Any) -> StepResult:
        seen.extend(batches)
        return take(stepping, state, batches, *more)

    monkeypatch.setattr(StepRunner, "run", noted)
    return seen


@pytest.mark.parametrize("fresh", [0, 3])
def test_new_rows_after_so_many_iterations(
    fresh: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: tuple[Argument, ...] = ("--lbfgs-fresh", fresh) if fresh else ()
    seen = watched(monkeypatch)
    ran(
        "from-scratch",
        text_file(tmp_path),
        *TINY,
        *LBFGS,
        *given,
        "--ctx",
        32,
        "--batch",
        2,
        "--iters",
        9,
        "--out",
        tmp_path / "r",
    )
    same = [np.array_equal(one.tokens, other.tokens) for one, other in pairwise(seen)]
    assert same == [not fresh or step % fresh != 0 for step in range(1, 9)]


def test_rows_that_give_no_more_are_left(tmp_path: Path) -> None:
    """A run goes on with others, and says so."""
    given = ("--lbfgs-fresh", 1000, "--batch", 1, "--iters", 400, "--precision", "bf16")
    done = ran("from-scratch", *SINE, *LBFGS, *given, "--out", tmp_path / "run")
    assert "; continuing with new rows" in done.err
    assert len(steps(tmp_path / "run")) == 400
    assert all(math.isfinite(loss) for loss in losses(tmp_path / "run"))


def test_only_lbfgs_takes_new_rows(tmp_path: Path) -> None:
    done = run("from-scratch", text_file(tmp_path), *TINY, "--lbfgs-fresh", 3)
    assert len(done.errors) == 1 and done.errors[0].endswith(" [unused-option]")
    assert "--lbfgs-refresh has no effect with --optimizer adamw" in done.errors[0]
