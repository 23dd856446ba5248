"""`finetune` does what torch does with the same base, the same A and B, and the same rows: losses, gradients, what is written."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain.model.hyperparameters import Hyperparameters
from tests.helpers.cli import Argument, pairs_file, ran, rows, steps, text_file
from tests.helpers.lora_runs import LINEAR, TYPES, WIDE, alpha, base, decoded, deltas, pairs, random_adapter
from tests.helpers.small_models import EMBEDDINGS, OUTPUT, small

pytestmark = pytest.mark.reference

PEAK = 1e-3


@dataclass(frozen=True)
class Case:
    shape: dict[str, Any] = field(default_factory=dict)
    targets: tuple[str, ...] = ()  # those of each layer, if none are given
    more: tuple[Argument, ...] = ()
    batch: int = 2
    grad_acc: int = 1
    ctx: int = 32
    kind: str = "F32"
    ratio: float = 1.0
    clip: float = 1.0
    alpha: float = 8.0
    rslora: bool = False
    ranks: dict[str, int] = field(default_factory=dict)
    eps: float = 1e-5
    freq_base: float = 10000.0
    paired: bool = False  # prompts and answers, of which the answers are trained
    apart: tuple[str, ...] = ()

    @property
    def h(self) -> Hyperparameters:
        return small(**self.shape)

    @property
    def names(self) -> set[str]:
        """The weights that have a pair."""
        given = self.targets or LINEAR
        return {name for name in self.h.shapes if name.removesuffix(".weight").rpartition(".")[2] in given}

    @property
    def rows(self) -> tuple[Argument, ...]:
        return ("--ctx", self.ctx, "--batch", self.batch, "--seed", 3, *self.apart)

    @property
    def options(self) -> tuple[Argument, ...]:
        targets = (word for target in self.targets for word in ("--target", target))
        ranks = (word for name, rank in self.ranks.items() for word in ("--rank", f"{name}={rank}"))
        return (*self.rows, *targets, *ranks, "--grad-acc", self.grad_acc, "--lr", PEAK, *self.more)

    def rank(self, name: str) -> int:
        return self.ranks.get(name.removesuffix(".weight").rpartition(".")[2], 8)

    def scale(self, name: str) -> float:
        return self.alpha / (math.sqrt(self.rank(name)) if self.rslora else self.rank(name))

    @property
    def numbers(self) -> Any:
        from tests.helpers.plain_llama import Numbers

        return Numbers(self.h.heads, self.h.kv_heads, self.eps, self.freq_base)


def compare(case: Case, folder: Path, precision: str = "f32", iters: int = 30, near: float = 1e-4) -> None:
    from tests.helpers.plain_lora import Lora, Trainer

    data = (
        pairs_file(folder) if case.paired else text_file(folder, 70 * case.batch * case.ctx * case.grad_acc)
    )
    model = base(folder / "base.gguf", case.h, case.kind)
    given = ("finetune", model, data, *case.options, "--precision", precision)
    ran(*given, "--iters", 0, "--out", folder / "first")
    ran(*given, "--iters", iters, "--out", folder / "run")
    told, each = steps(folder / "run"), case.batch * case.grad_acc
    assert [line["step"] for line in told] == list(range(1, iters + 1)) and max(
        line["lr"] for line in told
    ) >= 0.99 * PEAK
    first = pairs(folder / "first" / "adapter.gguf")
    assert first.keys() == case.names
    shown = rows(iters * each, data, "--model", model, *case.rows)
    lora = Lora(decoded(model), first, {name: case.scale(name) for name in first})
    trainer = Trainer(lora, clip=case.clip, ratio=case.ratio)
    for number, line in enumerate(told):
        loss, norm = trainer.step(case.numbers, shown[number * each : (number + 1) * each], line["lr"])
        assert line["loss"] == pytest.approx(loss, abs=near), f"step {number + 1}"
        assert line["grad_norm"] == pytest.approx(norm, rel=1e-2 if precision == "f32" else 0.1), (
            f"step {number + 1}"
        )
    found = deltas(folder / "run" / "adapter.gguf")
    for name, delta in found.items():
        expected = lora.delta(name).detach().numpy()
        assert apart(delta, expected) <= (2e-2 if precision == "f32" else 0.3), name


def apart(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


# ---- losses ----------------------------------------------------------------


CASES = {
    "all": Case(),
    "every head its own": Case(shape={"kv_heads": 4}, ctx=37, batch=3),
    "one key head": Case(shape={"kv_heads": 1}, batch=1),
    "queries and values": Case(targets=("attn_q", "attn_v"), grad_acc=3),
    "one matrix": Case(targets=("ffn_down",)),
    "keys": Case(targets=("attn_k",), ctx=37),
    "the gate": Case(targets=("ffn_gate",), batch=3),
    "with both ends": Case(
        targets=(EMBEDDINGS[:-7], *LINEAR, OUTPUT[:-7]), alpha=20, more=("--lora-alpha", 20)
    ),
    "both ends alone": Case(targets=(EMBEDDINGS[:-7], OUTPUT[:-7]), grad_acc=3, batch=1),
    "embeddings": Case(targets=(EMBEDDINGS[:-7],)),
    "the output": Case(targets=(OUTPUT[:-7],)),
    "tied": Case(shape={"tied": True}, grad_acc=2),
    "wide heads": Case(shape={"heads": 2, "kv_heads": 1, "head_size": 80, "embd": 96}, ctx=37),
    "recomputed": Case(shape={"layers": 3}, more=("--remat", "block")),
    "plain attention": Case(more=("--no-flash",)),
    "another alpha": Case(alpha=32, more=("--lora-alpha", 32)),
    "ranks": Case(ranks={"attn_q": 16, "ffn_down": 1, "attn_v": 3}),
    "rslora": Case(rslora=True, more=("--rslora",), ranks={"attn_q": 16}),
    "faster b": Case(ratio=4, more=("--lora-plus-ratio", 4)),
    "faster b, each gradient used at once": Case(ratio=4, clip=0, more=("--lora-plus-ratio", 4, "--clip", 0)),
    "packed": Case(paired=True),
    "packed, with the output": Case(paired=True, targets=(*LINEAR, OUTPUT[:-7]), grad_acc=2),
    "not packed": Case(paired=True, apart=("--no-pack",)),
    "packed, recomputed": Case(paired=True, shape={"layers": 3}, more=("--remat", "block")),
    "another rope": Case(more=("--rope-freq-base", 500, "--norm-rms-eps", 1e-2), eps=1e-2, freq_base=500),
}
QUICK = ("all", "with both ends", "rslora", "tied", "faster b, each gradient used at once", "packed")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_thirty_losses(name: str, tmp_path: Path) -> None:
    compare(CASES[name], tmp_path)


@pytest.mark.parametrize(
    "name", [name if name == "all" else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_thirty_losses_in_bf16(name: str, tmp_path: Path) -> None:
    compare(CASES[name], tmp_path, "bf16", near=2e-2)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "Q4_0" else pytest.mark.slow) for kind in TYPES]
)
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_thirty_losses_of_each_type(kind: str, precision: str, tmp_path: Path) -> None:
    compare(
        Case({"embd": 256, "head_size": 64, "ff": 256, "layers": 1}, kind=kind),
        tmp_path,
        precision,
        near=2e-2,
    )


# ---- gradients -------------------------------------------------------------


def gradients(
    model: Path, data: Path, start: Path, *more: Argument
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """What one plain step of a huge rate subtracts, through that rate."""
    rate, out = 1000.0, start.with_suffix(".run")
    plain = (
        "--optimizer",
        "sgd",
        "--beta1",
        0,
        "--weight-decay",
        0,
        "--clip",
        0,
        "--schedule",
        "constant",
        "--warmup",
        0,
    )
    ran(
        "finetune", model, data, "--lora-init", start, *plain, "--lr", rate, "--iters", 1, *more, "--out", out
    )
    before, after = pairs(start), pairs(out / "adapter.gguf")
    assert before.keys() == after.keys()
    return {
        name: tuple((x - y) / rate for x, y in zip(before[name], after[name], strict=True)) for name in before
    }


def torch_gradients(
    n: Any, model: Path, start: Path, shown: Sequence[dict[str, np.ndarray]]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    from tests.helpers.plain_lora import Lora

    first = pairs(start)
    lora = Lora(
        decoded(model), first, {name: alpha(start) / pair[1].shape[1] for name, pair in first.items()}
    )
    lora.loss(n, shown).backward()
    return {name: (lora.a[name].grad.numpy(), lora.b[name].grad.numpy()) for name in first}


GRADIENTS = {
    "all": Case(targets=(EMBEDDINGS[:-7], *LINEAR, OUTPUT[:-7]), ctx=37, grad_acc=3),
    "tied": Case(shape={"tied": True, "kv_heads": 4}),
    "recomputed": Case(more=("--remat", "block"), targets=("attn_k", "ffn_up"), ctx=37),
    "plain attention": Case(more=("--no-flash",), batch=5),
    "wide heads": Case(shape={"heads": 2, "kv_heads": 1, "head_size": 80, "embd": 96}),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_each_gradient(name: str, tmp_path: Path) -> None:
    near(GRADIENTS[name], tmp_path, 1e-4)


@pytest.mark.parametrize("kind", TYPES)
def test_each_gradient_of_each_type(kind: str, tmp_path: Path) -> None:
    shape = {"embd": WIDE.embd, "head_size": WIDE.head_size, "ff": WIDE.ff, "layers": WIDE.layers}
    near(Case(shape, (EMBEDDINGS[:-7], *LINEAR, OUTPUT[:-7]), kind=kind), tmp_path, 1e-4)


def near(case: Case, folder: Path, limit: float) -> None:
    data, model = text_file(folder), base(folder / "base.gguf", case.h, case.kind)
    start = random_adapter(folder / "start.gguf", case.h, sorted(case.names))
    found = gradients(
        model, data, start, *case.rows, "--grad-acc", case.grad_acc, "--precision", "f32", *case.more
    )
    shown = rows(case.batch * case.grad_acc, data, "--model", model, *case.rows)
    expected = torch_gradients(case.numbers, model, start, shown)
    assert found.keys() == case.names
    for name, halves in expected.items():
        for half, mine, theirs in zip("ab", found[name], halves, strict=True):
            assert apart(mine, theirs) <= limit, f"{half} of {name}"
