"""`finetune`: what it trains, on which bases, and what it leaves."""

import json
import math
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain.adapters import gguf, peft
from llamatrain.gguf.reader import open_gguf
from llamatrain.run.request import request_finetune
from llamatrain.run.resolve import default_rate
from tests.helpers.cli import Argument, losses, metrics, ran, run, same_bits, steps, tensors, text, text_file
from tests.helpers.lora_runs import (
    TYPES,
    WIDE,
    alpha,
    base,
    decoded,
    deltas,
    new_weights,
    pairs,
    random_adapter,
)
from tests.helpers.small_models import EMBEDDINGS, small

H = small()
MATRICES = [name for name, shape in H.shapes.items() if len(shape) == 2 and name.startswith("blk.")]
ROWS = ("--ctx", 32, "--batch", 4, "--seed", 3)
QUICK = ("F32", "F16", "BF16", "Q4_0", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path)
    (tmp_path / "val.txt").write_text(text(1000, seed=2))
    base(tmp_path / "base.gguf", H)
    return tmp_path


def finetuned(out: str, *more: Argument, model: str = "base.gguf", iters: int = 3) -> Path:
    ran("finetune", model, "text.txt", *ROWS, "--precision", "f32", "--iters", iters, *more, "--out", out)
    return Path(out)


def evaluated(*arguments: Argument) -> float:
    done = ran("evaluate", *arguments, "--ctx", 32, "--precision", "f32", "--json")
    return float(json.loads(done.out)["loss"])


# ---- defaults --------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "rate"),
    [
        ({}, 0.0035),
        ({"full": True}, 1e-4),
        ({"objective": "dpo"}, 1e-4),
        ({"checkpoint_in": "base.gguf"}, 1e-4),  # a model that is trained as a whole
    ],
)
def test_whole_models_have_a_lower_rate(given: dict[str, Any], rate: float, place: Path) -> None:
    base = None if "checkpoint_in" in given else "base.gguf"
    config = request_finetune(base, ("text.txt",), given).config
    assert default_rate(config, 576) == rate and (config.train.lr, config.train.batch) == (None, 4)


def test_wider_models_have_a_lower_rate(place: Path) -> None:
    config = request_finetune("base.gguf", ("text.txt",), {}).config
    rates = [default_rate(config, width) for width in (32, 128, 256, 1024, 4096)]
    assert rates == [0.01, 0.01, 0.0078, 0.002, 0.00049]


@pytest.mark.parametrize(
    ("given", "rate"),
    [
        ({"lora_r": 32}, 0.0035),
        ({"lora_alpha": 32.0}, 0.0017),
        ({"lora_r": 2, "lora_alpha": 2.0}, 0.0069),
        ({"lora_plus_ratio": 16.0}, 0.00087),
        ({"lora_r": 16, "rslora": True}, 0.0017),
    ],
)
def test_stronger_adapters_have_a_lower_rate(given: dict[str, Any], rate: float, place: Path) -> None:
    config = request_finetune("base.gguf", ("text.txt",), given).config
    assert default_rate(config, 576) == rate


def test_the_header_has_the_rate(place: Path) -> None:
    words = ("finetune", "base.gguf", "text.txt", *ROWS, "--iters", 1)
    assert "adamw with rate 0.01, 1 step" in ran(*words, "--out", "adapter").err
    whole = ran(*words, "--full", "--lr", 0.003, "--out", "whole")
    assert "adamw with rate 0.003, 1 step" in whole.err
    minimized = ran(*words, "--optimizer", "lbfgs", "--out", "minimized")
    assert "lbfgs, 1 step" in minimized.err


def test_an_adapter_that_is_trained_further(place: Path) -> None:
    finetuned("first", "--lora-alpha", 32, "--lora-r", 16, iters=1)
    then = finetuned("then", "--lora-init", "first/adapter.gguf", iters=1)
    assert tomllib.loads((then / "config.toml").read_text())["lr"] == 0.01
    assert alpha(then / "adapter.gguf") == 32
    ran("finetune", "--resume", "first", "--iters", 2)
    assert alpha(Path("first/adapter.gguf")) == 32


def test_the_rate_is_written_down(place: Path) -> None:
    config = tomllib.loads((finetuned("run", "--batch", 2, iters=1) / "config.toml").read_text())
    assert (config["lr"], config["lr-min"]) == (0.01, 0.001)
    repeated = ("--config", "run/config.toml", "--out", "again")
    ran("finetune", *repeated)
    same_bits(Path("run/adapter.gguf"), Path("again/adapter.gguf"))
    whole = tomllib.loads((finetuned("whole", "--full", iters=1) / "config.toml").read_text())
    assert whole["lr"] == 1e-4


def test_a_least_rate_above_the_default(place: Path) -> None:
    done = run("finetune", "base.gguf", "text.txt", *ROWS, "--lr-min", 0.02)
    assert done.code == 2 and "--lr-min must not exceed --lr 0.01 (got 0.02)" in done.errors[0]


def test_all_ranks_have_the_same_alpha(place: Path) -> None:
    for rank in (2, 16):
        assert alpha(finetuned(f"rank-{rank}", "--lora-r", rank, iters=1) / "adapter.gguf") == 8


# ---- bases -----------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in TYPES]
)
def test_each_type_is_trained_on(kind: str, place: Path) -> None:
    """The loss falls, and is the one on the decoded weights."""
    base(place / "wide.gguf", WIDE, kind)
    before = (place / "wide.gguf").read_bytes()
    base(place / "floats.gguf", WIDE, arrays=decoded(place / "wide.gguf"))
    found, expected = (
        losses(finetuned(f"run-{name}", "--lr", 1e-2, model=f"{name}.gguf", iters=12))
        for name in ("wide", "floats")
    )
    assert found == pytest.approx(expected, abs=1e-3) and all(map(math.isfinite, found))
    assert np.mean(found[-3:]) < found[0] - 0.3
    assert (place / "wide.gguf").read_bytes() == before


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K", "F16", "BF16"])
def test_each_type_is_trained_on_in_bf16(kind: str, place: Path) -> None:
    base(place / "wide.gguf", WIDE, kind)
    found = losses(finetuned("run", "--lr", 1e-2, "--precision", "bf16", model="wide.gguf", iters=12))
    assert all(map(math.isfinite, found)) and np.mean(found[-3:]) < found[0] - 0.3


def test_a_type_that_no_product_unpacks(place: Path) -> None:
    """Its weights are unpacked once: exactly, where products are in float32."""
    base(place / "wide.gguf", WIDE, "IQ3_S")
    base(place / "floats.gguf", WIDE, arrays=decoded(place / "wide.gguf"))
    found, expected = (
        losses(finetuned(f"run-{name}", "--lr", 1e-2, model=f"{name}.gguf")) for name in ("wide", "floats")
    )
    assert found == pytest.approx(expected, abs=1e-5)
    half = ("--precision", "bf16", "--cache-base", "off", "--lr", 1e-2, "--iters", 3)
    off = ran("finetune", "wide.gguf", "text.txt", *ROWS, *half, "--out", "off")
    assert "unpacked once" in off.err and losses(Path("off")) == pytest.approx(expected, abs=2e-2)
    matrices = sum(array.size for array in decoded(place / "wide.gguf").values() if array.ndim == 2)
    plan = json.loads(ran("plan", "finetune", "wide.gguf", "text.txt", "--precision", "f32", "--json").out)
    assert plan["packed_copies"] == 4 * matrices
    said = [
        ran("generate", f"{name}.gguf", "--prompt", "Once", "--temp", 0, "-n", 20).out
        for name in ("wide", "floats")
    ]
    assert said[0] == said[1]


def test_copies_for_speed_change_nothing_but_rounding(place: Path) -> None:
    base(place / "wide.gguf", WIDE, "Q4_K")
    given = ("--lr", 1e-3, "--precision", "bf16")
    one, other = (
        losses(finetuned(f"c-{cache}", *given, "--cache-base", cache, model="wide.gguf"))
        for cache in ("off", "bf16")
    )
    assert one == pytest.approx(other, abs=5e-3)


def test_a_base_in_parts(place: Path) -> None:
    from llamatrain.gguf.values import u32
    from llamatrain.gguf.writer import create_gguf

    whole = open_gguf(base(place / "whole.gguf", H, "Q8_0"))
    every = list(whole.tensors.values())
    for i, part in enumerate((every[:9], every[9:])):
        keys = (dict(whole.metadata.raw_values) if i == 0 else {}) | {
            "split.no": u32(i),
            "split.count": u32(2),
            "split.tensors.count": u32(len(every)),
        }
        with create_gguf(place / f"s-0000{i + 1}-of-00002.gguf", keys, part) as out:
            for tensor in part:
                out.write(tensor.name, tensor.raw)
    split, one = finetuned("split", model="s-00001-of-00002.gguf"), finetuned("one", model="whole.gguf")
    same_bits(split / "adapter.gguf", one / "adapter.gguf")


def test_rows_are_as_long_as_the_model_was_made_for(place: Path) -> None:
    ran("finetune", "base.gguf", "text.txt", "--iters", 1, "--out", "run")
    assert steps(place / "run")[0]["tokens"] == 4 * 64


# ---- what is trained -------------------------------------------------------


def test_a_new_adapter(place: Path) -> None:
    """A is random, B is 0: the first loss is the base's own, and line 0 says what that is on validation data."""
    folder = finetuned("run", "--val", "val.txt", iters=0)
    made = pairs(folder / "adapter.gguf")
    assert list(made) == MATRICES and alpha(folder / "adapter.gguf") == 8
    for name, (a, b) in made.items():
        out, into = H.shapes[name]
        assert (
            a.shape == (8, into)
            and b.shape == (out, 8)
            and not b.any()
            and 0.05 < a.std() * math.sqrt(into) < 2
        ), name
    assert len({a.tobytes() for a, _ in made.values()}) == len(made)
    line = metrics(folder)[0]
    assert line["step"] == 0 and line["val_loss"] == pytest.approx(
        evaluated("base.gguf", "val.txt"), abs=1e-5
    )
    same_bits(folder / "adapter.gguf", finetuned("again", "--val", "val.txt", iters=0) / "adapter.gguf")
    other = pairs(finetuned("other", "--seed", 4, iters=0) / "adapter.gguf")
    assert all(not np.array_equal(a, other[name][0]) for name, (a, _) in made.items())


def test_validation_is_that_of_evaluate(place: Path) -> None:
    folder = finetuned("run", "--val", "val.txt", "--eval-every", 3, "--lr", 1e-2, iters=6)
    found = {line["step"]: line["val_loss"] for line in metrics(folder) if "val_loss" in line}
    assert list(found) == [0, 3, 6] and metrics(folder)[0]["step"] == 0
    assert found[6] == pytest.approx(
        evaluated("base.gguf", "val.txt", "--lora", folder / "adapter.gguf"), abs=1e-5
    )
    assert found[6] < found[3] < found[0]


def test_the_file_is_what_llama_cpp_takes(place: Path) -> None:
    found = open_gguf(finetuned("run") / "adapter.gguf")
    values = {key: found.metadata[key] for key in ("general.type", "general.architecture", "adapter.type")}
    assert values == {"general.type": "adapter", "general.architecture": "llama", "adapter.type": "lora"}
    assert {tensor.type.name for tensor in found.tensors.values()} == {"F32"}
    assert list(found.tensors) == [f"{name}.{half}" for name in MATRICES for half in ("lora_a", "lora_b")]
    half = open_gguf(finetuned("half", "--adapter-type", "f16") / "adapter.gguf")
    assert {tensor.type.name for tensor in half.tensors.values()} == {"F16"}
    for name in MATRICES:
        a, b = (gguf.parse_adapter(open_gguf(x.path)).delta(name) for x in (found, half))
        assert np.abs(a - b).max() <= 2e-3 * np.abs(a).max()


def test_targets(place: Path) -> None:
    found = pairs(
        finetuned("run", "--target", "attn_q", "--target", "token_embd", "--target", "output")
        / "adapter.gguf"
    )
    assert sorted(found) == [
        "blk.0.attn_q.weight",
        "blk.1.attn_q.weight",
        "output.weight",
        "token_embd.weight",
    ]
    a, b = found[EMBEDDINGS]
    assert a.shape == (H.vocab, 8) and b.shape == (H.embd, 8)


def test_ranks(place: Path) -> None:
    given = ("--lora-r", 2, "--rank", "attn_q=16", "--rank", "ffn_down=1", "--lora-alpha", 4)
    found = pairs(finetuned("run", *given) / "adapter.gguf")
    ranks = {"attn_q": 16, "ffn_down": 1}
    assert {name: a.shape[0] for name, (a, _) in found.items()} == {
        name: ranks.get(name.split(".")[2], 2) for name in MATRICES
    }
    assert alpha(Path("run") / "adapter.gguf") == 4


def test_what_does_not_train_takes_no_moments(place: Path) -> None:
    found = tensors(finetuned("run", "--target", "attn_q") / "checkpoint-LATEST.gguf")
    trained = sum(a.size + b.size for a, b in pairs(Path("run") / "adapter.gguf").values())
    sizes = {name: array.size for name, array in found.items() if "moments" in name}
    assert len(sizes) == 2 and set(sizes.values()) == {trained}
    assert sum(array.size for array in found.values()) < 4 * trained


def test_rates(place: Path) -> None:
    """B learns faster by a ratio; A of a new adapter does not move in the first step, whose gradient is 0 where B is."""
    plain = ("--schedule", "constant", "--warmup", 0, "--lr", 1e-4, "--weight-decay", 0)
    one, other = (
        pairs(finetuned(f"r{ratio}", *plain, "--lora-plus-ratio", ratio, iters=1) / "adapter.gguf")
        for ratio in (1, 16)
    )
    first = pairs(finetuned("first", iters=0) / "adapter.gguf")
    for name in MATRICES:
        assert np.allclose(other[name][1], 16 * one[name][1], rtol=1e-4, atol=1e-9) and one[name][1].any()
        assert np.array_equal(one[name][0], first[name][0])


def test_dropout(place: Path) -> None:
    """From the seed alone: the same in every run, and where it is computed again; none in validation."""
    given = ("--lr", 1e-2, "--lora-dropout", 0.5, "--val", "val.txt", "--eval-every", 4)
    one, again = finetuned("one", *given, iters=8), finetuned("again", *given, iters=8)
    assert losses(one) == losses(again) != losses(finetuned("none", "--lr", 1e-2, iters=8))
    same_bits(one / "adapter.gguf", again / "adapter.gguf")
    kept, recomputed = (
        finetuned(f"remat-{remat}", *given, "--remat", remat, iters=8) for remat in ("none", "block")
    )
    assert losses(kept) == losses(recomputed)
    same_bits(kept / "adapter.gguf", recomputed / "adapter.gguf")
    told = [line["val_loss"] for line in metrics(one) if "val_loss" in line]
    assert told[-1] == pytest.approx(
        evaluated("base.gguf", "val.txt", "--lora", one / "adapter.gguf"), abs=1e-5
    )


# ---- from one adapter to the next ------------------------------------------


def test_going_on_from_an_adapter(place: Path) -> None:
    random_adapter(place / "a.gguf", H, MATRICES, rank=3)
    same_bits(place / "a.gguf", finetuned("same", "--lora-init", "a.gguf", iters=0) / "adapter.gguf")
    first = losses(finetuned("on", "--lora-init", "a.gguf", "--batch", 188, iters=1))[0]
    assert first == pytest.approx(evaluated("base.gguf", "text.txt", "--lora", "a.gguf"), abs=1e-5)


def test_an_adapter_mixed_in(place: Path) -> None:
    """It counts in the losses and is not in the file that is written."""
    random_adapter(place / "a.gguf", H, MATRICES[:5])
    random_adapter(place / "b.gguf", H, [EMBEDDINGS, *MATRICES[3:]], rank=2)
    mixed = ("--lora", "a.gguf", "--lora-scaled", "b.gguf", "-0.5")
    folder = finetuned("run", *mixed, "--lr", 1e-2, iters=5)
    ran("export-lora", "base.gguf", *mixed, "--out", "merged.gguf")
    merged = finetuned("merged", "--lr", 1e-2, model="merged.gguf", iters=5)
    assert losses(folder) == pytest.approx(losses(merged), abs=1e-4)
    assert losses(folder)[0] != losses(finetuned("none", iters=1))[0]
    found, expected = deltas(folder / "adapter.gguf"), deltas(merged / "adapter.gguf")
    assert found.keys() == expected.keys() == set(MATRICES)
    for name, delta in found.items():
        assert np.linalg.norm(delta - expected[name]) <= 2e-2 * np.linalg.norm(expected[name]), name


def test_the_ancestors_adapters_are_mixed_in(place: Path) -> None:
    from tests.helpers.adapter_files import adapter, ggla

    made = adapter(H, MATRICES)
    (place / "old.bin").write_bytes(ggla(made, 4, 8))
    gguf.write_adapter(place / "new.gguf", made)
    assert losses(finetuned("old", "--lora", "old.bin")) == losses(finetuned("new", "--lora", "new.gguf"))


def test_rslora(place: Path) -> None:
    """In training the scale is alpha / sqrt(r); the file says the same through alpha / r and a larger B."""
    folder = finetuned(
        "run", "--rslora", "--lora-r", 4, "--lora-alpha", 4, "--val", "val.txt", "--lr", 1e-2, iters=5
    )
    told = [line["val_loss"] for line in metrics(folder) if "val_loss" in line]
    assert told[-1] == pytest.approx(
        evaluated("base.gguf", "val.txt", "--lora", folder / "adapter.gguf"), abs=1e-5
    )
    plain = finetuned("plain", "--lora-r", 4, "--lora-alpha", 8, "--lr", 1e-2, iters=5)  # 8 / 4 = 4 / sqrt(4)
    assert losses(folder) == losses(plain)
    first, other = deltas(folder / "adapter.gguf"), deltas(plain / "adapter.gguf")
    assert all(np.allclose(first[name], other[name], rtol=1e-5, atol=1e-7) for name in first)


def test_peft(place: Path) -> None:
    """A folder is written beside, which leads to the same adapter."""
    folder = finetuned("run", "--peft", "theirs", "--lr", 1e-2)
    assert (place / "theirs" / peft.WEIGHTS).exists() and (place / "theirs" / peft.CONFIG).exists()
    same_bits(folder / "adapter.gguf", finetuned("same", "--lora-init", "theirs", iters=0) / "adapter.gguf")
    one, other = (
        evaluated("base.gguf", "text.txt", "--lora", path) for path in (folder / "adapter.gguf", "theirs")
    )
    assert one == other


def test_only_writing_the_adapter(place: Path) -> None:
    folder = finetuned("run", "--lr", 1e-2)
    before = (folder / "adapter.gguf").read_bytes()
    checkpoint = (folder / "checkpoint-LATEST.gguf").read_bytes()
    (folder / "adapter.gguf").unlink()
    ran("finetune", "--resume", "run", "--only-write-lora")
    assert (folder / "adapter.gguf").read_bytes() == before and len(steps(folder)) == 3
    assert (folder / "checkpoint-LATEST.gguf").read_bytes() == checkpoint


# ---- scales, and the whole model -------------------------------------------


def test_a_scale_of_nothing(place: Path) -> None:
    adapter = finetuned("run", "--lr", 1e-2) / "adapter.gguf"
    plain, none, full = (
        evaluated("base.gguf", "text.txt", *given)
        for given in ((), ("--lora-scaled", adapter, 0), ("--lora", adapter))
    )
    assert plain == none != full
    said = [
        ran("generate", "base.gguf", "--prompt", "Once", "--temp", 0, "-n", 20, *given).out
        for given in ((), ("--lora-scaled", adapter, 0))
    ]
    assert said[0] == said[1]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K"])
def test_merged_in_eight_bits_it_is_as_good(kind: str, place: Path) -> None:
    """Perplexity within a hundredth of base and adapter, though each weight is rounded."""
    base(place / "wide.gguf", WIDE, kind)
    adapter = finetuned("run", "--lr", 1e-2, model="wide.gguf", iters=40) / "adapter.gguf"
    ran("export-lora", "wide.gguf", "--lora", adapter, "--type", "q8_0", "--out", "merged.gguf")
    plain, expected, found = (
        evaluated(*each, "val.txt")
        for each in (("wide.gguf",), ("wide.gguf", "--lora", adapter), ("merged.gguf",))
    )
    assert expected < plain - 0.3 and math.exp(abs(found - expected)) < 1.01


@pytest.mark.parametrize("kind", ["F32", "Q4_0"])
def test_the_adapter_is_the_merged_model(kind: str, place: Path) -> None:
    base(place / "base.gguf", H, kind)
    adapter = finetuned("run", "--lr", 1e-2, iters=20) / "adapter.gguf"
    ran("export-lora", "base.gguf", "--lora", adapter, "--type", "f32", "--out", "merged.gguf")
    beside, merged = (
        evaluated("base.gguf", "text.txt", "--lora", adapter),
        evaluated("merged.gguf", "text.txt"),
    )
    assert beside == pytest.approx(merged, abs=1e-5) and beside < evaluated("base.gguf", "text.txt") - 0.1
    said = [
        ran("generate", *given, "--prompt", "Once", "--temp", 0, "-n", 20).out
        for given in (("base.gguf", "--lora", adapter), ("merged.gguf",))
    ]
    assert said[0] == said[1]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_the_whole_model(kind: str, place: Path) -> None:
    base(place / "base.gguf", H, kind)
    folder = finetuned("run", "--full", "--lr", 1e-2, iters=10)
    assert losses(folder)[-1] < losses(folder)[0] - 0.3
    assert not (folder / "adapter.gguf").exists()
    before, after = decoded(place / "base.gguf"), decoded(folder / "model.gguf")
    assert before.keys() == after.keys() and not [
        name for name in before if np.array_equal(before[name], after[name])
    ]
    said = metrics(finetuned("val", "--full", "--val", "val.txt", iters=1))
    assert said[0]["step"] == 0 and said[0]["val_loss"] == pytest.approx(
        evaluated("base.gguf", "val.txt"), abs=1e-5
    )


def test_the_whole_model_as_a_new_one_is_trained(place: Path) -> None:
    given = ("text.txt", *ROWS, "--precision", "f32", "--iters", 4, "--lr", 1e-3)
    ran("finetune", "base.gguf", *given, "--full", "--out", "one")
    ran("from-scratch", "--checkpoint-in", "base.gguf", *given, "--out", "other")
    assert losses(Path("one")) == losses(Path("other"))
    same_bits(Path("one") / "model.gguf", Path("other") / "model.gguf")


def test_base_numbers_are_kept(place: Path) -> None:
    h = small(rms_eps=1e-3)
    base(place / "eps.gguf", h, arrays=new_weights(h))
    one, other = (
        losses(finetuned(f"eps{i}", *more, model="eps.gguf"))
        for i, more in enumerate(((), ("--norm-rms-eps", 1e-5)))
    )
    assert one != other == losses(finetuned("plain"))


def test_it_has_another_name(place: Path) -> None:
    ran("finetune-lora", "base.gguf", "text.txt", *ROWS, "--iters", 1, "--out", "run")
    assert (place / "run" / "adapter.gguf").exists()


def test_the_whole_model_with_another_rope(place: Path) -> None:
    """What it was trained with stands in its file."""
    given = (
        "--full",
        "--rope-freq-base",
        500,
        "--rope-freq-scale",
        0.5,
        "--norm-rms-eps",
        0.03,
        "--lr",
        1e-2,
    )
    folder = finetuned("run", *given, "--val", "val.txt")
    model = open_gguf(folder / "model.gguf")
    assert (
        model.get_value("llama.rope.freq_base", float) == 500
        and model.get_value("llama.rope.scaling.factor", float) == 2
    )
    last = [line["val_loss"] for line in metrics(folder) if "val_loss" in line][-1]
    assert evaluated(folder / "model.gguf", "val.txt") == pytest.approx(last, abs=1e-6)
    assert (
        "same"
        in ran(
            "finetune", "base.gguf", "text.txt", *ROWS, "--norm-rms-eps", 0.03, "--iters", 0, "--out", "lora"
        ).err
    )


def test_a_model_to_start_from_is_a_base_that_is_trained_whole(place: Path) -> None:
    common = ("text.txt", *ROWS, "--precision", "f32", "--iters", 2)
    ran("finetune", "--checkpoint-in", "base.gguf", *common, "--out", "one")
    ran("finetune", "base.gguf", *common, "--full", "--out", "other")
    same_bits(Path("one") / "model.gguf", Path("other") / "model.gguf")


@pytest.mark.parametrize(
    "given", [("--lora-init", "first/adapter.gguf"), ("--full",), ("--optimizer", "lbfgs"), ("--rslora",)]
)
def test_the_options_that_a_run_writes_are_those_of_such_a_run(
    given: tuple[Argument, ...], place: Path
) -> None:
    finetuned("first", "--target", "attn_v")
    folder = finetuned("run", *given, "--rope-freq-base", 5000)
    ran("finetune", "base.gguf", "--config", folder / "config.toml", "--out", "again")
    assert losses(folder) == losses(Path("again"))
    for one, other in zip(
        *((Path(out) / "config.toml").read_text().splitlines()[1:] for out in ("run", "again")), strict=True
    ):
        assert one == other


def test_what_a_run_writes_names_its_base_and_data(place: Path) -> None:
    folder = finetuned("run")
    shutil.copy("base.gguf", "other.gguf")
    Path("more.txt").write_text(Path("text.txt").read_text() * 2)
    for given, model, data in (
        ((), "base.gguf", "text.txt"),
        (("more.txt",), "base.gguf", "more.txt"),
        (("other.gguf",), "other.gguf", "text.txt"),
        (("other.gguf", "more.txt"), "other.gguf", "more.txt"),
    ):
        ran(
            "finetune",
            *given,
            "--config",
            folder / "config.toml",
            "--iters",
            0,
            "--out",
            "again",
            "--overwrite",
        )
        told = tomllib.loads(Path("again/config.toml").read_text())
        assert (Path(told["base"]).name, [Path(file).name for file in told["data"]]) == (model, [data])


def test_copies_of_the_base_only_where_they_fit(place: Path) -> None:
    base(place / "wide.gguf", small(embd=256, heads=4, head_size=64, ff=1024, layers=8), "Q4_0")
    common = ("wide.gguf", "text.txt", *ROWS, "--precision", "bf16")
    off, copied = (
        json.loads(ran("plan", "finetune", *common, "--cache-base", how, "--json").out)["total"]
        for how in ("off", "bf16")
    )
    assert off < copied - 10_000_000
    limit = f"{(off + copied) // 2 // 1000}KB"
    ran("finetune", *common, "--iters", 1, "--memory", limit, "--out", "run")
    assert 'cache-base = "off"' in Path("run/config.toml").read_text()
    ran("finetune", *common, "--iters", 1, "--out", "free")
    assert 'cache-base = "bf16"' in Path("free/config.toml").read_text()


def test_longer_rows_than_the_model_was_made_for_are_told_of(place: Path) -> None:
    said = ran(
        "finetune", "base.gguf", "text.txt", "--ctx", 80, "--batch", 1, "--iters", 1, "--out", "run"
    ).err
    assert "80 tokens" in said and "made for 64" in said


def test_an_adapter_of_the_largest_scale_is_read_again(place: Path) -> None:
    adapter = finetuned("run", "--lora-r", 1, "--lora-alpha", 1e6, "--lr", 1e-12, iters=1) / "adapter.gguf"
    assert math.isfinite(evaluated("base.gguf", "text.txt", "--lora", adapter))
