"""What `finetune` cannot do: one line that says so, before any weight is read."""

import os
import resource
from pathlib import Path

import pytest

from llamatrain.adapters import gguf
from llamatrain.gguf.types import TensorInfo, type_by_name
from llamatrain.gguf.values import string
from llamatrain.gguf.writer import create_gguf
from tests.helpers.adapter_files import adapter, linear
from tests.helpers.cli import Argument, Done, finished, lines, ran, run, started, text_file
from tests.helpers.lora_runs import WIDE, base, new_weights
from tests.helpers.small_models import EMBEDDINGS, OUTPUT, small, written
from tests.run.test_from_scratch_errors import refused

H, TIED = small(), small(tied=True)
Q = "blk.0.attn_q.weight"
ROWS = ("--ctx", 32, "--batch", 2)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path)
    base(tmp_path / "base.gguf", H)
    base(tmp_path / "tied.gguf", TIED)
    written(tmp_path / "mamba.gguf", H, new_weights(H), more={"general.architecture": string("mamba")})
    gguf.write_adapter("wide.gguf", adapter(WIDE, linear(WIDE)))
    gguf.write_adapter("ends.gguf", adapter(H, [EMBEDDINGS, OUTPUT]))
    gguf.write_adapter("deep.gguf", adapter(small(layers=3), ["blk.2.attn_q.weight"]))
    gguf.write_adapter("plain.gguf", adapter(H, linear(H)))
    if "checkpoint" in request.node.name:
        ran("finetune", "base.gguf", "text.txt", *ROWS, "--iters", 1, "--out", "run0")
    return tmp_path


def tried(model: str, *arguments: Argument) -> Done:
    return run("finetune", model, "text.txt", *ROWS, "--iters", 2, "--out", "run", *arguments)


NEAR = (r"attn_q\b",)
SLIPS: dict[str, tuple[str, int | tuple[int, ...], tuple[Argument, ...], tuple[str, ...]]] = {
    "another architecture": ("mamba.gguf", 1, (), ("mamba.gguf", "'mamba'", "llama")),
    "no such base": ("none.gguf", (1, 2), (), ("none.gguf", "[Nn]o such file")),
    "a base that is none": ("text.txt", 1, (), ("text.txt",)),
    "a base that is an adapter": ("plain.gguf", 1, (), ("plain.gguf", "adapter")),
    "no such adapter to begin with": (
        "base.gguf",
        2,
        ("--lora-init", "none.gguf"),
        ("none.gguf", "No such file"),
    ),
    "no such adapter to mix in": ("base.gguf", 2, ("--lora", "none.gguf"), ("none.gguf", "No such file")),
    "no such scaled adapter": (
        "base.gguf",
        2,
        ("--lora-scaled", "none.gguf", 1),
        ("none.gguf", "No such file"),
    ),
    "an adapter that is a model": ("base.gguf", 1, ("--lora", "tied.gguf"), ("tied.gguf", "model")),
    "an adapter that is text": ("base.gguf", 1, ("--lora-init", "text.txt"), ("text.txt",)),
    "another base's": ("base.gguf", 1, ("--lora", "wide.gguf"), (Q, r"\[256, 256\]", r"\[64, 64\]")),
    "another base's to begin with": (
        "base.gguf",
        1,
        ("--lora-init", "wide.gguf"),
        (Q, r"\[256, 256\]", r"\[64, 64\]"),
    ),
    "a deeper base's": ("base.gguf", 1, ("--lora-init", "deep.gguf"), ("blk.2.attn_q.weight",)),
    "an adapter of tied ends": ("tied.gguf", 1, ("--lora-init", "ends.gguf"), ("token_embd|output", "tied")),
    "a scale that is no number": (
        "base.gguf",
        2,
        ("--lora-scaled", "plain.gguf", "nan"),
        ("--lora-scaled", "nan"),
    ),
    "an unknown target": ("base.gguf", (1, 2), ("--target", "attn_qq"), ("attn_qq", *NEAR)),
    "an unknown rank": ("base.gguf", (1, 2), ("--rank", "attn_qq=4"), ("attn_qq", *NEAR)),
    "a rank of what is no target": (
        "base.gguf",
        (1, 2),
        ("--target", "attn_q", "--rank", "attn_k=4"),
        ("attn_k",),
    ),
    "a rank without a number": ("base.gguf", 2, ("--rank", "attn_q"), ("--lora-rank-of", "attn_q")),
    "a rank that is no number": ("base.gguf", 2, ("--rank", "attn_q=many"), ("--lora-rank-of", "many")),
    "a rank of 0": ("base.gguf", 2, ("--rank", "attn_q=0"), ("--lora-rank-of", "0")),
    "a rank below 0": ("base.gguf", 2, ("--lora-r", -1), ("--lora-r", "-1")),
    "no rank": ("base.gguf", 2, ("--lora-r", 0), ("--lora-r", "0")),
    "a huge rank": ("base.gguf", (1, 2), ("--lora-r", 1 << 40), ("rank|--lora-r",)),
    "an alpha that is no number": ("base.gguf", 2, ("--lora-alpha", "nan"), ("--lora-alpha", "nan")),
    "an alpha below 0": ("base.gguf", 2, ("--lora-alpha", -1), ("--lora-alpha", "-1")),
    "an alpha beyond what a file can tell": (
        "base.gguf",
        2,
        ("--lora-alpha", 1e39),
        ("--lora-alpha", "1e[+]39"),
    ),
    "an alpha that makes a scale that no reader takes": (
        "base.gguf",
        2,
        ("--lora-r", 1, "--lora-alpha", 2e6),
        ("--lora-alpha", "2e[+]06"),
    ),
    "an alpha that a file would call 0": ("base.gguf", 2, ("--lora-alpha", 1e-46), ("--lora-alpha", "1e-46")),
    "a huge ratio": ("base.gguf", 2, ("--lora-plus-ratio", 1e300), ("--lora-plus-ratio",)),
    "a rank of thousands of digits": (
        "base.gguf",
        2,
        ("--rank", "attn_q=" + 5000 * "9"),
        ("--lora-rank-of", "attn_q"),
    ),
    "a scale of positions beyond what is sane": (
        "base.gguf",
        2,
        ("--rope-freq-scale", 1e-45),
        ("--rope-freq-scale",),
    ),
    "no base": ("", 2, (), ("no model",)),
    "no folder": ("base.gguf", 2, ("--peft", ""), ("--peft", "empty")),
    "blocks beyond the last": ("base.gguf", 2, ("--target", "blk.0-9.attn_q"), ("blk.0-9.attn_q", "0 to 1")),
    "blocks from the last to the first": (
        "base.gguf",
        2,
        ("--target", "blk.1-0.attn_q"),
        ("blk.1-0.attn_q", "0 to 1"),
    ),
    "a checkpoint of an adapter": ("run0/checkpoint-1.gguf", 2, (), ("checkpoint of an adapter", "--resume")),
    "all is dropped": ("base.gguf", 2, ("--lora-dropout", 1), ("--lora-dropout", "1")),
    "less than nothing is dropped": ("base.gguf", 2, ("--lora-dropout", -0.1), ("--lora-dropout", "-0.1")),
    "a ratio of 0": ("base.gguf", 2, ("--lora-plus-ratio", 0), ("--lora-plus-ratio", "0")),
    "a ratio that is no number": ("base.gguf", 2, ("--lora-plus-ratio", "nan"), ("--lora-plus-ratio", "nan")),
    "the tied output": ("tied.gguf", (1, 2), ("--target", "output"), ("output", "tied")),
    "the tied embeddings": ("tied.gguf", (1, 2), ("--target", "token_embd"), ("token_embd", "tied")),
    "all, and a rank": ("base.gguf", 2, ("--full", "--lora-r", 4), ("--full", "--lora-r")),
    "all, and a target": ("base.gguf", 2, ("--full", "--target", "attn_q"), ("--full", "--target")),
    "all, and an adapter to begin with": (
        "base.gguf",
        2,
        ("--full", "--lora-init", "plain.gguf"),
        ("--full", "--lora-init"),
    ),
    "a layer that is not there": ("base.gguf", (1, 2), ("--target", "blk.7.attn_q"), ("blk.7.attn_q",)),
    "two bases": ("base.gguf", 2, ("--checkpoint-in", "tied.gguf"), ("--checkpoint-in",)),
    "a rate of b where one step has one rate": (
        "base.gguf",
        2,
        ("--optimizer", "lbfgs", "--lora-plus-ratio", 4),
        ("--lora-plus-ratio", "lbfgs"),
    ),
    "an epsilon of 2": ("base.gguf", (1, 2), ("--norm-rms-eps", 2), ("--norm-rms-eps", "2")),
    "no frequency": ("base.gguf", (1, 2), ("--rope-freq-base", 0), ("--rope-freq-base", "0")),
    "rows beyond what is sane": ("base.gguf", (1, 2), ("--ctx", 1 << 30), ("ctx",)),
    "no row at all": ("base.gguf", 2, ("--ctx", 0), ("--ctx",)),
    "memory too small": ("base.gguf", 1, ("--memory", "10MB"), ("10 ?MB", "memory")),
    "peft in a file's place": ("base.gguf", (1, 2), ("--peft", "text.txt"), ("text.txt",)),
}


@pytest.mark.parametrize("name", SLIPS)
def test_slips_are_one_line(name: str, place: Path) -> None:
    model, code, arguments, words = SLIPS[name]
    before = {path: path.read_bytes() for path in place.iterdir() if path.is_file()}
    refused(tried(model, *arguments), code, *words)
    assert not (place / "run" / "adapter.gguf").exists() and lines(place / "run") == 0
    assert {path: path.read_bytes() for path in place.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("option", ["--adapter-type", "--cache-base"])
def test_unknown_words_are_usage_errors(option: str, place: Path) -> None:
    done = tried("base.gguf", option, "whatever")
    assert done.code == 2 and option in done.err and "whatever" in done.err and "Traceback" not in done.err


@pytest.mark.parametrize("arguments", [(), ("base.gguf",)])
def test_what_is_missing(arguments: tuple[str, ...], place: Path) -> None:
    done = run("finetune", *arguments, "--out", "run")
    assert done.code == 2 and "Traceback" not in done.err and not (place / "run").exists()


def test_what_is_read_is_not_written(place: Path) -> None:
    """Neither the base nor an adapter is replaced, by whatever name."""
    (place / "run").mkdir()
    (place / "base.gguf").rename(place / "run" / "adapter.gguf")
    before = (place / "run" / "adapter.gguf").read_bytes()
    for model in ("run/adapter.gguf", "link.gguf"):
        if model == "link.gguf":
            (place / "link.gguf").symlink_to(place / "run" / "adapter.gguf")
        refused(tried(model, "--overwrite"), (1, 2), "run")
        assert (place / "run" / "adapter.gguf").read_bytes() == before
    base(place / "base.gguf", H)
    gguf.write_adapter(place / "run" / "adapter.gguf", adapter(H, linear(H)))
    before = (place / "run" / "adapter.gguf").read_bytes()
    for option in ("--lora", "--lora-init"):
        refused(tried("base.gguf", "--overwrite", option, "run/adapter.gguf"), (1, 2), "run")
        assert (place / "run" / "adapter.gguf").read_bytes() == before


def test_the_base_in_the_way_of_a_whole_model(place: Path) -> None:
    (place / "run").mkdir()
    (place / "base.gguf").rename(place / "run" / "model.gguf")
    before = (place / "run" / "model.gguf").read_bytes()
    refused(tried("run/model.gguf", "--full", "--overwrite"), (1, 2), "run")
    assert (place / "run" / "model.gguf").read_bytes() == before


def test_a_run_that_is_there(place: Path) -> None:
    ran("finetune", "base.gguf", "text.txt", *ROWS, "--iters", 1, "--out", "run")
    before = (place / "run" / "adapter.gguf").read_bytes()
    refused(tried("base.gguf"), (1, 2), "run", "--resume|--overwrite")
    assert (place / "run" / "adapter.gguf").read_bytes() == before


def test_another_architecture_is_refused_by_its_head(place: Path) -> None:
    """Before loading weights: a base larger than the memory that the process may have."""
    h = small(embd=1 << 12, heads=32, head_size=128, ff=1 << 14, layers=40)
    infos = [TensorInfo(name, type_by_name("F32"), shape) for name, shape in h.shapes.items()]
    from llamatrain.data.tokenizer import new_vocab
    from llamatrain.gguf.writer import encode_head

    keys = h.metadata("huge") | new_vocab.bytes_vocabulary() | {"general.architecture": string("mamba")}
    made = encode_head(keys, infos, 32)
    with Path("huge.gguf").open("wb") as file:
        file.write(made + bytes(-len(made) % 32))
        file.truncate(file.tell() + sum(info.nbytes for info in infos))
    if os.name != "posix":
        pytest.skip("limits of memory are of Unix")
    most = 3 << 30
    limited = lambda: resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    with started("finetune", "huge.gguf", "text.txt", "--out", "run", preexec_fn=limited) as process:
        refused(finished(process), 1, "huge.gguf", "'mamba'", "llama")


def test_a_pair_of_nothing_is_not_begun_with(place: Path) -> None:
    """Numbers that are not finite, in a factor."""
    made = adapter(H, [Q])
    made.pairs[Q].a[0, 0] = float("nan")
    gguf_of(place / "nan.gguf", made.pairs[Q].a, made.pairs[Q].b)
    for option in ("--lora-init", "--lora"):
        refused(tried("base.gguf", option, "nan.gguf"), 1, "nan.gguf", Q, "finite")


def gguf_of(path: Path, a: object, b: object) -> None:
    """Written without the checks that our own writer makes."""
    import numpy as np

    from llamatrain.gguf.values import f32

    keys = {
        "general.type": string("adapter"),
        "general.architecture": string("llama"),
        "adapter.type": string("lora"),
        "adapter.lora.alpha": f32(4.0),
    }
    arrays = {f"{Q}.lora_a": np.asarray(a), f"{Q}.lora_b": np.asarray(b)}
    with create_gguf(
        path, keys, [TensorInfo(name, type_by_name("F32"), array.shape) for name, array in arrays.items()]
    ) as out:
        for name, array in arrays.items():
            out.write(name, array)
