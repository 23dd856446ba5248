"""What the ancestors could train: adapters of norms, quantised models whole, models of factors; how it ends, and the seed."""

import json
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

from llamatrain.adapters.read import read_adapter
from llamatrain.checkpoints.read import read_checkpoint as read_checkpoint
from llamatrain.gguf.reader import open_gguf
from tests.helpers.cli import TINY, Argument, losses, ran, run, same_bits, steps, tensors, text_file
from tests.helpers.lora_runs import base, decoded
from tests.helpers.small_models import small

H = small()
ROWS: tuple[Argument, ...] = ("--ctx", 32, "--batch", 2, "--precision", "f32", "--lr", 0.02)
NORMS = [name for name in H.shapes if "norm" in name]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path)
    base(tmp_path / "base.gguf", H)
    return tmp_path


def evaluated(*arguments: Argument) -> float:
    return float(json.loads(ran("evaluate", *arguments, "text.txt", "--ctx", 32, "--json").out)["loss"])


# ---- adapters of norms and embeddings --------------------------------------


def test_norms_embeddings_and_output_are_trained(place: Path) -> None:
    done = ran(
        "finetune",
        "base.gguf",
        "text.txt",
        *ROWS,
        "--target",
        "norms,token_embd,output",
        "--iters",
        6,
        "--out",
        "run",
    )
    assert done.err.rstrip().splitlines()[-1] == (
        "note: llama.cpp applies no pairs of norms, such as that for blk.0.attn_norm.weight, and says nothing: "
        "export-lora merges them"
    )
    adapter = read_adapter(Path("run/adapter.gguf"), H)
    assert set(adapter.pairs) == {*NORMS, "token_embd.weight", "output.weight"}
    assert all(adapter.pairs[name].rank == 1 and np.abs(adapter.delta(name)).max() > 0 for name in NORMS)
    assert adapter.pairs["output.weight"].rank == 8
    assert losses(Path("run"))[-1] < losses(Path("run"))[0]
    ran("export-lora", "base.gguf", "--lora", "run/adapter.gguf", "--out", "merged.gguf")
    assert evaluated("base.gguf", "--lora", "run/adapter.gguf") == pytest.approx(
        evaluated("merged.gguf"), abs=1e-5
    )
    assert evaluated("merged.gguf") < evaluated("base.gguf")
    changed = {
        name
        for name, array in decoded(Path("merged.gguf")).items()
        if (array != decoded(Path("base.gguf"))[name]).any()
    }
    assert changed == set(adapter.pairs)


def test_a_rank_of_a_norm_gives_it_an_adapter_beside_the_usual_ones(place: Path) -> None:
    ran("finetune", "base.gguf", "text.txt", *ROWS, "--rank", "attn_norm=2", "--iters", 2, "--out", "run")
    pairs = read_adapter(Path("run/adapter.gguf"), H).pairs
    assert pairs["blk.1.attn_norm.weight"].rank == 2 and pairs["blk.1.attn_q.weight"].rank == 8
    assert "output_norm.weight" not in pairs and "blk.0.ffn_norm.weight" not in pairs


def test_such_a_run_goes_on_to_the_same_bits(place: Path) -> None:
    given = ("base.gguf", "text.txt", *ROWS, "--target", "norms", "--target", "attn_v", "--save-every", 2)
    ran("finetune", *given, "--iters", 5, "--out", "whole")
    ran("finetune", "--resume", "whole/checkpoint-4.gguf", "--out", "other")
    same_bits(Path("other/adapter.gguf"), Path("whole/adapter.gguf"))


# ---- every weight of a quantised model -------------------------------------


def test_a_quantised_model_is_trained_whole(place: Path) -> None:
    wide = small(embd=256, heads=4, head_size=64, ff=256, layers=1)
    base(place / "q.gguf", wide, "Q4_K")
    done = ran("finetune", "q.gguf", "text.txt", *ROWS, "--full", "--iters", 3, "--out", "full")
    assert re.search(r"note: all weights are trained and written in F32 .*Q4_K", done.err), done.err
    assert {tensor.type.name for tensor in open_gguf("full/model.gguf").tensors.values()} == {"F32"}
    assert losses(Path("full"))[-1] < losses(Path("full"))[0]
    ran("from-scratch", "text.txt", "--checkpoint-in", "q.gguf", *ROWS, "--iters", 3, "--out", "scratch")
    same_bits(Path("full/model.gguf"), Path("scratch/model.gguf"))
    ran("finetune", "--resume", "full", "--iters", 4)
    assert len(steps(Path("full"))) == 4


# ---- when to end, and the seed ---------------------------------------------


@pytest.mark.parametrize(("iters", "epochs", "taken"), [(3, 2, 3), (50, 1, 24), (50, 2, 47)])
def test_whichever_comes_first(iters: int, epochs: int, taken: int, tmp_path: Path) -> None:
    data, given = text_file(tmp_path), ("--ctx", 32, "--batch", 8, "--epochs", epochs, "--iters", iters)
    ran("from-scratch", data, *TINY, *given, "--out", tmp_path / "run")
    assert len(steps(tmp_path / "run")) == taken


WAYS: dict[str, tuple[str | int, ...]] = {
    "at once": ("--no-pack",),
    "streamed": ("--no-pack", "--clip", 0),
    "added up": ("--no-pack", "--batch", 2, "--grad-acc", 4),
    "in groups": ("--no-pack", "--shards", 8),
    "packed": ("--pack", "--batch", 3),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("epochs", [1, 2])
def test_epochs_end_exactly(epochs: int, way: str, tmp_path: Path) -> None:
    """Each sample is trained as often as was asked for, with a smaller last step; the rate stays 0, so losses are the data's."""
    pairs = "".join(json.dumps({"prompt": "a" * n, "completion": "b" * n}) + "\n" for n in range(1, 14))
    (tmp_path / "d.jsonl").write_text(pairs)
    given = ("--ctx", 64, "--batch", 8, "--epochs", epochs, "--lr", 0, *WAYS[way])
    ran("from-scratch", tmp_path / "d.jsonl", *TINY, *given, "--out", tmp_path / "run")
    found = steps(tmp_path / "run")
    kept = read_checkpoint(tmp_path / "run" / "checkpoint-LATEST.gguf").state
    assert kept.data and (kept.data.epoch, kept.data.position) == (epochs, 0)
    assert found[-1]["tokens"] == epochs * sum(2 * n + 1 for n in range(1, 14))
    assert (found[-1]["epoch"], found[-1]["sample"]) == (epochs, 13)
    if way != "packed":
        assert kept.counters.samples == 13 * epochs
    if epochs == 1 and way == "at once":
        last = found[-1]["tokens"] - found[0]["tokens"]
        assert 0 < last < found[0]["tokens"] and len(found) == 2


def test_the_last_step_is_the_mean_of_the_rows_that_are_left(tmp_path: Path) -> None:
    data, given = text_file(tmp_path, 6 * 32), ("--ctx", 32, "--epochs", 1, "--lr", 0, "--no-shuffle")
    for batch in (2, 4):
        ran("from-scratch", data, *TINY, *given, "--batch", batch, "--out", tmp_path / f"{batch}")
    twos, fours = (losses(tmp_path / name) for name in ("2", "4"))
    assert (len(twos), len(fours)) == (3, 2) and fours[-1] == pytest.approx(twos[-1], rel=1e-6)


def test_a_run_goes_on_to_the_same_end_and_past_it(tmp_path: Path) -> None:
    """The end is kept in checkpoints; more --iters begin the next epoch with a whole step."""
    data, given = (
        text_file(tmp_path),
        ("--ctx", 32, "--batch", 8, "--epochs", 1, "--save-every", 11, "--keep", 9),
    )
    ran("from-scratch", data, *TINY, *given, "--out", tmp_path / "run")
    ran("from-scratch", "--resume", tmp_path / "run" / "checkpoint-22.gguf", "--out", tmp_path / "on")
    same_bits(tmp_path / "run" / "model.gguf", tmp_path / "on" / "model.gguf")
    assert steps(tmp_path / "on")[-1]["tokens"] == 188 * 32
    ran("from-scratch", "--resume", tmp_path / "on", "--iters", 25)
    assert steps(tmp_path / "on")[-1]["tokens"] == (188 + 8) * 32


def test_the_sine_counts_epochs_as_before(tmp_path: Path) -> None:
    ran(
        "from-scratch",
        "--epochs",
        9,
        "--batch",
        512,
        "--sample-every",
        0,
        "--embd",
        8,
        "--ctx",
        16,
        "--out",
        tmp_path / "run",
    )
    assert len(steps(tmp_path / "run")) == 18


def test_a_random_seed_is_told_and_kept(tmp_path: Path) -> None:
    data, seeds = text_file(tmp_path), list[int]()
    for name in ("one", "two"):
        done = ran(
            "from-scratch",
            data,
            *TINY,
            "--ctx",
            32,
            "--batch",
            2,
            "--iters",
            2,
            "--seed",
            -1,
            "--out",
            tmp_path / name,
        )
        told = re.search(r"note: --seed -1: drew (\d+)", done.err)
        assert told, done.err
        seeds.append(int(told[1]))
        assert tomllib.loads((tmp_path / name / "config.toml").read_text())["seed"] == seeds[-1]
    assert seeds[0] != seeds[1]
    again = ("--ctx", 32, "--batch", 2, "--iters", 2, "--seed", seeds[0], "--out", tmp_path / "again")
    ran("from-scratch", data, *TINY, *again)
    same_bits(tmp_path / "again" / "model.gguf", tmp_path / "one" / "model.gguf")
    ran("from-scratch", "--resume", tmp_path / "one", "--iters", 3)


# ---- a new model of low rank -----------------------------------------------


def rank_of(array: np.ndarray) -> int:
    return int(np.linalg.matrix_rank(array.astype(np.float64), tol=1e-5))


def test_a_new_model_of_factors(tmp_path: Path) -> None:
    """As baby-llama's third program: attention and output are products of random factors, all else is whole, all is trained."""
    data, folder = text_file(tmp_path), tmp_path / "run"
    given = ("--ctx", 32, "--batch", 4, "--lr", 0.01, "--lora-r", 3, "--save-every", 4, "--keep", 9)
    done = ran("from-scratch", data, *TINY, *given, "--iters", 12, "--out", folder)
    assert "have rank 3" in done.err
    first, last = tensors(folder / "checkpoint-4.gguf"), tensors(folder / "model.gguf")
    low = [name for name in last if re.search(r"attn_(q|k|v|output)\.|^output\.", name)]
    assert len(low) == 9 and all(rank_of(last[name]) == 3 for name in low)
    assert all(rank_of(array) > 3 for name, array in last.items() if array.ndim == 2 and name not in low)
    assert all((first[name] != array).any() for name, array in last.items())
    assert losses(folder)[-1] < losses(folder)[0] - 0.2
    product = first["blk.0.attn_q.weight.lora_b"] @ first["blk.0.attn_q.weight.lora_a"]
    np.testing.assert_allclose(product, first["blk.0.attn_q.weight"], rtol=1e-5, atol=1e-6)
    ran("from-scratch", "--resume", folder / "checkpoint-8.gguf", "--out", tmp_path / "other")
    same_bits(tmp_path / "other" / "model.gguf", folder / "model.gguf")
    assert ran("generate", folder / "model.gguf", "--prompt", "a", "-n", 3).code == 0
    assert ran("generate", folder / "checkpoint-LATEST.gguf", "--prompt", "a", "-n", 3).code == 0


def test_what_is_shown_is_what_is_trained(tmp_path: Path) -> None:
    """The sine, too, and text on the way."""
    given = ("--lora-r", 4, "--iters", 8, "--sample-every", 4)
    done = ran(
        "from-scratch",
        *given,
        "--embd",
        8,
        "--head",
        2,
        "--ctx",
        16,
        "--batch",
        2,
        "--out",
        tmp_path / "sine",
    )
    assert "64 greedily generated steps" in done.err
    done = ran(
        "from-scratch",
        text_file(tmp_path),
        *TINY,
        *given,
        "--ctx",
        32,
        "--batch",
        2,
        "--sample-prompt",
        "a",
        "--out",
        tmp_path / "t",
    )
    assert "sample at step 4" in done.err


def test_a_model_that_is_there_has_no_other_rank(tmp_path: Path) -> None:
    model = base(tmp_path / "base.gguf", H)
    done = run("from-scratch", text_file(tmp_path), "--checkpoint-in", model, "--lora-r", 3)
    assert done.code == 2 and "--lora-r has no effect on the model in" in done.err
