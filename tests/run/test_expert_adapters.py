"""Runs that train adapters of experts: targets, gradients, and resumed runs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from llamatrain.checkpoints.read import read_checkpoint
from tests.helpers import architecture_runs as runs
from tests.helpers.architecture_models import Arrays, mixtures, shape_of, weights, wide, written
from tests.helpers.cli import losses, ran, run, same_bits
from tests.helpers.lora_runs import pairs

SHAPE = shape_of("qwen3moe", "a")
RANKS = ("--lora-rank-of", "ffn_up_exps=2", "--lora-rank-of", "router=3", "--lora-rank-of", "blk.1.experts=5")


def test_targets_and_ranks(tmp_path: Path) -> None:
    """Check ranks, and the number of parameters of each group in the header and the plan."""
    base, data, out = runs.base(tmp_path, SHAPE), runs.data(tmp_path), tmp_path / "run"
    given = ("--target", "attention,experts,router", *RANKS, "--iters", 2, "--lr", 0.01)
    done = ran("finetune", base, data, *runs.PLAIN, *given, "--out", out)
    found = pairs(out / "adapter.gguf")
    sizes = {"attn_": 0, "_exps": 0, "gate_inp": 0}
    for name, (a, b) in found.items():
        (kind,) = (each for each in sizes if each in name)
        sizes[kind] += a.size + b.size
        rank = 3 if "gate_inp" in name else 8
        if kind == "_exps":
            rank = 5 if name.startswith("blk.1.") else 2 if "ffn_up" in name else 8
        assert a.shape[-2] == b.shape[-1] == rank and b.any(), name
    assert found.keys() == {name for name in weights(SHAPE) if "attn" in name or "ffn_" in name} - {
        name for name in weights(SHAPE) if "norm" in name
    }
    told = ", ".join(
        f"{name} {size:,}"
        for name, size in zip(("attention", "experts", "router"), sizes.values(), strict=True)
    )
    assert f"adapter     {told}\n" in done.err
    planned = ran("plan", "finetune", base, data, *runs.PLAIN, *given).out
    assert f"an adapter of {sum(sizes.values()):,} parameters: {told}\n" in planned


def test_experts_are_no_default(tmp_path: Path) -> None:
    base, data = runs.base(tmp_path, SHAPE), runs.data(tmp_path)
    ran("finetune", base, data, *runs.PLAIN, "--iters", 1, "--out", tmp_path / "run")
    assert all("attn_" in name for name in pairs(tmp_path / "run" / "adapter.gguf"))


@pytest.mark.parametrize("how", ["new", "from an adapter"])
def test_no_dropout(how: str, tmp_path: Path) -> None:
    base, data = runs.base(tmp_path, SHAPE), runs.data(tmp_path)
    first = runs.start(tmp_path, SHAPE, runs.factors(SHAPE, names=mixtures(SHAPE)))
    given = ("--target", "blk.1.experts,attn_q") if how == "new" else ("--lora-init", first)
    done = run("finetune", base, data, *runs.PLAIN, *given, "--lora-dropout", 0.1, "--out", tmp_path / "run")
    assert done.code == 2 and "--lora-dropout 0.1 does not work with adapters of experts" in done.errors[0]
    assert not (tmp_path / "run").exists()
    ran("finetune", base, data, *runs.PLAIN, "--lora-dropout", 0.1, "--iters", 1, "--out", tmp_path / "run")


# ---- gradients --------------------------------------------------------------


def biased(folder: Path, used: int, routers: float) -> tuple[Path, Path]:
    """Return a base whose routers are 0, or as they are; scores that are equal choose the first experts."""
    shape = replace(SHAPE, experts_used=used)  # type: ignore[call-arg]
    arrays: Arrays = weights(shape, last=1.0)
    arrays |= {name: np.float32(routers) * each for name, each in arrays.items() if "gate_inp" in name}
    return written(folder / "base.gguf", shape, arrays), runs.data(folder)


@pytest.mark.parametrize("used", [1, 2])
def test_experts_without_tokens(used: int, tmp_path: Path) -> None:
    """Send all rows to the first experts: the factors of the others stay as they are, to the bit."""
    base, data = biased(tmp_path, used, 0.0)
    names = [name for name in mixtures(SHAPE) if "_exps" in name]
    first = runs.start(tmp_path, SHAPE, runs.factors(SHAPE, names=names))
    given = ("--lora-init", first, *runs.PLAIN, *runs.SGD, "--lr", 1)
    ran("finetune", base, data, *given, "--out", tmp_path / "run")
    before, after = pairs(first), pairs(tmp_path / "run" / "adapter.gguf")
    assert before.keys() == after.keys()
    for name in before:
        for old, new in zip(before[name], after[name], strict=True):
            changed = np.abs(new - old).reshape(len(old), -1).max(1) > 0
            assert changed.tolist() == [True] * used + [False] * (SHAPE.experts - used), name  # type: ignore[attr-defined]


def stepped(folder: Path, base: Path, data: Path, first: Path, rate: float) -> tuple[float, Path]:
    """Return the loss before a step, and the adapter after it."""
    out = folder / f"run-{first.stem}-{rate:g}"
    given = ("--lora-init", first, *runs.PLAIN, *runs.SGD, "--lr", rate)
    ran("finetune", base, data, *given, "--out", out)
    return losses(out)[0], out / "adapter.gguf"


@pytest.mark.parametrize("used", [1, 3])
def test_the_loss_falls_by_the_gradient(used: int, tmp_path: Path) -> None:
    """A small step lowers the loss by the rate times the squared gradient: all of it, or it would fall by less."""
    base, data = biased(tmp_path, used, 1.0)
    names = [name for name in mixtures(SHAPE) if "_exps" in name]
    first, rate = runs.start(tmp_path, SHAPE, runs.factors(SHAPE, names=names)), 1e-3
    loss, after = stepped(tmp_path, base, data, first, rate)
    lower, _ = stepped(tmp_path, base, data, after, rate / 2)
    old, new = pairs(first), pairs(after)
    squares = sum(
        float(np.sum((x - y).astype(np.float64) ** 2))
        for name in old
        for x, y in zip(old[name], new[name], strict=True)
    )
    assert loss - lower == pytest.approx(squares / rate, rel=0.01) and squares > 0


# ---- how they go on ---------------------------------------------------------

GIVEN = (*runs.PLAIN, "--precision", "f32", "--target", "experts,attn_q,router", *RANKS, "--lr", 0.01)


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_resumed_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    shape = wide("qwen3moe")
    base, data = written(tmp_path / "f32.gguf", shape, weights(shape)), runs.data(tmp_path)
    if kind != "f32":
        ran("export-lora", base, "--type", kind, "--out", tmp_path / f"{kind}.gguf")
        base = tmp_path / f"{kind}.gguf"
    ran("finetune", base, data, *GIVEN, "--iters", 4, "--out", tmp_path / "whole")
    ran("finetune", base, data, *GIVEN, "--iters", 2, "--out", tmp_path / "parts")
    ran("finetune", "--resume", tmp_path / "parts", "--iters", 4)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    for name in ("checkpoint-4.gguf", "adapter.gguf"):
        same_bits(tmp_path / "parts" / name, tmp_path / "whole" / name)
    assert (
        read_checkpoint(tmp_path / "parts" / "checkpoint-4.gguf").extra["ranks"]["blk.0.ffn_up_exps.weight"]
        == 2
    )


def test_used_and_gone_on_from(tmp_path: Path) -> None:
    """Write an adapter again without training, evaluate and merge it, generate with it, and start from it."""
    base, data, out = runs.base(tmp_path, SHAPE), runs.data(tmp_path), tmp_path / "run"
    ran("finetune", base, data, *GIVEN, "--iters", 5, "--out", out)
    adapter = out / "adapter.gguf"
    written_again = (out / "adapter.gguf").read_bytes()
    adapter.unlink()
    ran("finetune", "--resume", out, "--only-write-lora")
    assert adapter.read_bytes() == written_again
    ran("export-lora", base, "--lora", adapter, "--out", tmp_path / "merged.gguf")
    beside = float(ran("evaluate", base, data, "--lora", adapter).out.split()[1])
    merged = float(ran("evaluate", tmp_path / "merged.gguf", data).out.split()[1])
    plain = float(ran("evaluate", base, data).out.split()[1])
    assert beside == pytest.approx(merged, abs=1e-5) and beside < plain - 0.01
    more = ("--lora-init", adapter, *runs.PLAIN, "--precision", "f32", "--iters", 1)
    ran("finetune", base, data, *more, "--out", tmp_path / "more")
    assert losses(tmp_path / "more")[0] < losses(out)[0]
    assert "rank                 2, 3, 5, 8" in ran("inspect", adapter).out
    texts = [
        ran("generate", model, *more, "-p", "ab", "-n", 8, "--temp", 0).out
        for model, more in ((base, ("--lora", adapter)), (tmp_path / "merged.gguf", ()))
    ]
    assert texts[0] == texts[1]
