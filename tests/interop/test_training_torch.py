"""The same losses, gradients and rates as a plain llama in torch that starts from the same weights and takes the same rows."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from llamatrain.gguf.reader import open_gguf
from tests.helpers.cli import losses, pairs_file, ran, rows, steps, tensors, text_file

pytestmark = pytest.mark.reference

WARMUP, DECAY, PEAK = 4, 20, 1e-3


@dataclass(frozen=True)
class Case:
    heads: int = 4
    kv_heads: int = 2
    size: int = 8
    tied: bool = False
    batch: int = 2
    grad_acc: int = 1
    clip: float = 1.0
    ctx: int = 32
    layers: int = 2
    seed: int = 3
    more: tuple[str, ...] = ()
    paired: bool = False  # prompts and answers, of which the answers are trained
    apart: tuple[str, ...] = ()

    def data(self, folder: Path, iters: int = 30) -> Path:
        return pairs_file(folder) if self.paired else text_file(folder, 5 * iters * self.ctx + 5)

    @property
    def model(self) -> tuple[str | int, ...]:
        """Options for `from-scratch`."""
        heads = ("--embd", self.heads * self.size, "--head", self.heads, "--head-kv", self.kv_heads)
        tied = "--tie-embeddings" if self.tied else "--no-tie-embeddings"
        return (
            "--vocab-size",
            "bytes",
            *heads,
            "--layer",
            self.layers,
            "--ff",
            56,
            tied,
            *self.rows,
            *self.more,
        )

    @property
    def rows(self) -> tuple[str | int, ...]:
        return ("--ctx", self.ctx, "--batch", self.batch, "--seed", self.seed, *self.apart)

    @property
    def training(self) -> tuple[str | int | float, ...]:
        rate = ("--lr", PEAK, "--warmup", WARMUP, "--decay-steps", DECAY)
        return (*self.model, *rate, "--grad-acc", self.grad_acc, "--clip", self.clip)


def rate(step: int) -> float:
    """Up in a line from a tenth of the peak, reached in step `WARMUP`; down in half a wave to a tenth; then that."""
    least = PEAK / 10
    if step < WARMUP:
        return least + (PEAK - least) * step / WARMUP
    part = min((step - WARMUP) / DECAY, 1.0)
    return least + (PEAK - least) * 0.5 * (1 + math.cos(math.pi * part))


def size_of(row: dict[str, np.ndarray]) -> int:
    """Its tokens but for padding, where each sees only itself: behind the last that is trained."""
    return int(np.flatnonzero(row["weights"])[-1]) + 1


def compare(case: Case, precision: str, iters: int, folder: Path) -> None:
    from tests.helpers.plain_llama import Numbers, Trainer, weights_of

    data = case.data(folder)
    ran("from-scratch", data, *case.model, "--iters", 0, "--out", folder / "first")
    ran(
        "from-scratch",
        data,
        *case.training,
        "--precision",
        precision,
        "--iters",
        iters,
        "--out",
        folder / "run",
    )
    told = steps(folder / "run")
    assert [line["step"] for line in told] == list(range(1, iters + 1))
    each = case.batch * case.grad_acc
    shown = rows(iters * each, data, "--model", folder / "first" / "model.gguf", *case.rows)
    trainer = Trainer(weights_of(tensors(folder / "first" / "model.gguf")), case.clip)
    numbers, near = Numbers(case.heads, case.kv_heads), {"f32": 1e-4, "bf16": 2e-2}[precision]
    seen = 0
    for number, line in enumerate(told):
        mine = shown[number * each : (number + 1) * each]
        loss, norm = trainer.step(numbers, mine, rate(number + 1))
        seen += sum(size_of(row) for row in mine)
        assert line["loss"] == pytest.approx(loss, abs=near), f"step {number + 1}"
        assert line["lr"] == pytest.approx(rate(number + 1), rel=1e-5)
        assert line["tokens"] == seen
        if precision == "f32" and case.clip:
            assert line["grad_norm"] == pytest.approx(norm, rel=1e-2)
    assert told[-1]["loss"] < told[0]["loss"]


CASES = {
    "grouped": Case(),
    "tied": Case(tied=True, kv_heads=4, clip=0.5),
    "batch 1": Case(batch=1, ctx=37, kv_heads=1),
    "batch 7": Case(batch=7, ctx=37),
    "tied, accumulated": Case(grad_acc=3, ctx=37, batch=1, tied=True),
    "accumulated": Case(grad_acc=3),
    "heads of 48": Case(heads=2, kv_heads=1, size=48, layers=1),
    "heads of 80": Case(heads=2, kv_heads=2, size=80, layers=1),
    "clipped hard": Case(clip=0.05),
    "not clipped": Case(clip=0),
    "batch 7, accumulated, tied": Case(batch=7, grad_acc=3, tied=True, ctx=37),
    "plain attention": Case(more=("--no-flash",)),
    "recomputed": Case(more=("--remat", "block"), layers=3),
    "packed": Case(paired=True),
    "not packed": Case(paired=True, grad_acc=3, apart=("--no-pack",)),
    "packed, plain attention": Case(paired=True, more=("--no-flash",)),
    "packed, recomputed": Case(paired=True, batch=3, tied=True, layers=3, more=("--remat", "optimal")),
}
QUICK = ("grouped", "tied, accumulated", "heads of 48", "packed", "not packed")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_thirty_losses(name: str, tmp_path: Path) -> None:
    compare(CASES[name], "f32", 30, tmp_path)


@pytest.mark.parametrize(
    "name", [name if name == "grouped" else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_thirty_losses_in_bf16(name: str, tmp_path: Path) -> None:
    compare(CASES[name], "bf16", 30, tmp_path)


@pytest.mark.parametrize(
    "case",
    [
        Case(ctx=37, clip=0),
        Case(tied=True, grad_acc=3, clip=0.05),
        Case(paired=True, batch=4, clip=0),
        pytest.param(Case(tied=True, grad_acc=3, ctx=37, clip=0), marks=pytest.mark.slow),
        pytest.param(Case(heads=2, kv_heads=1, size=80, clip=0), marks=pytest.mark.slow),
        pytest.param(Case(batch=7, clip=0, more=("--no-flash",)), marks=pytest.mark.slow),
    ],
)
def test_each_gradient(case: Case, tmp_path: Path) -> None:
    """AdamW's first moments after one step are a tenth of the gradients, which have been cut to the norm of --clip."""
    from tests.helpers.plain_llama import Numbers, loss, weights_of

    data, f32 = case.data(tmp_path), ("--precision", "f32", "--iters")
    ran("from-scratch", data, *case.training, *f32, 0, "--out", tmp_path / "first")
    ran("from-scratch", data, *case.training, *f32, 1, "--out", tmp_path / "run")
    weights = weights_of(tensors(tmp_path / "first" / "model.gguf"))
    shown = rows(case.batch * case.grad_acc, data, "--model", tmp_path / "first" / "model.gguf", *case.rows)
    loss(weights, Numbers(case.heads, case.kv_heads), shown).backward()
    gradients = {
        name: weight.grad.numpy().ravel() for name, weight in weights.items() if weight.grad is not None
    }
    norm = math.sqrt(sum(float(gradient @ gradient) for gradient in gradients.values()))
    cut = min(1.0, case.clip / norm) if case.clip else 1.0
    checkpoint = tmp_path / "run" / "checkpoint-LATEST.gguf"
    order = open_gguf(checkpoint).get_value("optimizer.parameter_order", list)
    moments, at = tensors(checkpoint)["optimizer.adam.first_moments"], 0
    assert sorted(order) == sorted(gradients)
    for name in order:
        expected = cut * gradients[name]
        found = 10 * moments[at : at + expected.size]
        at += expected.size
        assert np.linalg.norm(found - expected) <= 1e-4 * np.linalg.norm(expected), name
    assert at == moments.size


def test_accumulation_changes_nothing_but_rounding(tmp_path: Path) -> None:
    data, case = text_file(tmp_path), Case(batch=6)
    ran("from-scratch", data, *case.training, "--precision", "f32", "--iters", 8, "--out", tmp_path / "whole")
    parts = Case(batch=2, grad_acc=3)
    ran(
        "from-scratch", data, *parts.training, "--precision", "f32", "--iters", 8, "--out", tmp_path / "parts"
    )
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)
