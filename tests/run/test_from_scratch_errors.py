"""What cannot be: one line that says so, an exit code, and no work lost."""

import os
import re
import resource
import subprocess
from pathlib import Path

import numpy as np
import pytest

from llamatrain.gguf.values import string
from tests.helpers.cli import (
    PROGRAM,
    TINY,
    Argument,
    Done,
    environment,
    finished,
    lines,
    losses,
    ran,
    run,
    started,
    steps,
    tensors,
    text_file,
    until,
)
from tests.helpers.tiny_gguf import llama_metadata, llama_tensors, write_arrays


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path)
    write_arrays(tmp_path / "small.gguf", llama_metadata(), llama_tensors())
    return tmp_path


def refused(done: Done, code: int | tuple[int, ...], *words: str) -> None:
    """One line, all the words in it, nothing else that alarms."""
    assert "Traceback" not in done.err, done.err
    assert done.code in (code if isinstance(code, tuple) else (code,)), (done.code, done.err)
    ends = [line for line in done.err.splitlines() if line.lower().startswith("error:")]
    assert len(ends) == 1, done.err
    assert done.err.rstrip().splitlines()[-1] == ends[0], "the error comes last"
    assert done.out == ""
    missing = [word for word in words if not re.search(word, ends[0])]
    assert not missing, (missing, ends[0])


def tried(*arguments: Argument) -> Done:
    return run("from-scratch", "text.txt", *TINY, "--ctx", 32, "--iters", 3, "--out", "run", *arguments)


SLIPS: dict[str, tuple[int | tuple[int, ...], tuple[Argument, ...], tuple[str, ...]]] = {
    "heads do not divide the width": ((1, 2), ("--embd", 32, "--head", 5), ("32", "5")),
    "heads do not divide among kv heads": ((1, 2), ("--head", 4, "--head-kv", 3), ("4", "3")),
    "an odd head": ((1, 2), ("--embd", 30, "--head", 2), ("15|pairs|even",)),
    "rows longer than the data": ((1, 2), ("--ctx", 100_000), ("100,?000", "ctx")),
    "no row at all": (2, ("--ctx", 0), ("--ctx",)),
    "no batch": (2, ("--batch", 0), ("--batch",)),
    "a negative batch": (2, ("--batch", -1), ("--batch",)),
    "no accumulation": (2, ("--grad-acc", 0), ("--grad-acc",)),
    "negative steps": (2, ("--iters", -1), ("--iters",)),
    "no layer": ((1, 2), ("--layer", 0), ("layer",)),
    "a rate below 0": (2, ("--lr", -1), ("rate|--lr",)),
    "a rate that is no number": (2, ("--lr", "nan"), ("rate|--lr",)),
    "the least rate above the rate": (2, ("--lr", 1e-3, "--lr-min", 1), ("rate|--lr-min",)),
    "a beta of 1": (2, ("--beta1", 1), ("--beta1",)),
    "a beta below 0": (2, ("--beta2", -0.1), ("--beta2",)),
    "a negative clip": (2, ("--clip", -1), ("--clip",)),
    "a clip that is no number": (2, ("--clip", "nan"), ("--clip",)),
    "a negative decay": (2, ("--weight-decay", -0.1), ("--weight-decay",)),
    "a warm-up below 0": (2, ("--warmup", -3), ("warm-?up",)),
    "a negative eps": (2, ("--norm-rms-eps", -1), ("--norm-rms-eps",)),
    "no thread": (2, ("--threads", 0), ("--threads",)),
    "no history": (2, ("--optimizer", "lbfgs", "--lbfgs-history", 0), ("history",)),
    "nothing kept": (2, ("--keep", 0), ("--keep",)),
    "two vocabularies": ((1, 2), ("--vocab-from", "small.gguf"), ("--vocab-from", "--vocab-size")),
    "validation twice": (2, ("--val", "text.txt", "--val-split", 0.1), ("--val", "--val-split")),
    "all is validation": (2, ("--val-split", 1), ("--val-split",)),
    "a vocabulary too small": ((1, 2), ("--vocab-size", 3), ("vocab", "3")),
    "a vocabulary of no size": (2, ("--vocab-size", "many"), ("--vocab-size", "many")),
    "memory in strange units": (2, ("--memory", "6 parsecs"), ("--memory", "6 parsecs")),
    "time in strange units": (2, ("--max-time", "soon"), ("--max-time", "soon")),
    "memory too small": (1, ("--memory", "10MB"), ("10 ?MB", "memory")),
    "no such config": ((1, 2), ("--config", "none.toml"), ("none.toml",)),
    "validation data that is not there": (2, ("--val", "none.txt"), ("none.txt",)),
    "a model that is not there": (2, ("--checkpoint-in", "none.gguf"), ("none.gguf",)),
    "a model that is none": (1, ("--checkpoint-in", "text.txt"), ("text.txt",)),
    "a run that is not there": (2, ("--resume", "nowhere"), ("nowhere",)),
    "wildly large": ((1, 2), ("--embd", 1 << 40), ("embd",)),
    "too large for any machine": (1, ("--embd", 1 << 18, "--head", 8, "--layer", 6), ("memory|GB|GiB|TB",)),
}


@pytest.mark.parametrize("name", SLIPS)
def test_slips_are_one_line(name: str, place: Path) -> None:
    code, arguments, words = SLIPS[name]
    refused(tried(*arguments), code, *words)
    assert not (place / "run" / "model.gguf").exists() and lines(place / "run") == 0


@pytest.mark.parametrize(
    "option", ["--optimizer", "--schedule", "--precision", "--remat", "--line-search", "--size"]
)
def test_unknown_words_are_usage_errors(option: str, place: Path) -> None:
    done = tried(option, "whatever")
    assert done.code == 2 and option in done.err and "whatever" in done.err and "Traceback" not in done.err


def test_options_of_another_optimizer_are_refused(place: Path) -> None:
    """No flag does nothing."""
    for given in (
        ("--line-search", "armijo"),
        ("--lbfgs-history", 3),
        ("--optimizer", "lbfgs", "--beta1", 0.5),
    ):
        refused(tried(*given), 2, given[-2])


# ---- files and folders -----------------------------------------------------


def test_missing_data(place: Path) -> None:
    refused(run("from-scratch", "nothing.txt", "--out", "run"), 2, "nothing.txt")
    (place / "empty.txt").write_text("")
    refused(run("from-scratch", "empty.txt", "--out", "run"), 1, "empty.txt|no .*(text|token|sample|data)")
    (place / "bad.jsonl").write_text('{"text": "abc"}\n{"nothing": 1}\n')
    refused(run("from-scratch", "bad.jsonl", "--out", "run"), 1, "bad.jsonl", "2")


@pytest.mark.parametrize("out", ["text.txt", "text.txt/run", "/proc/run"])
def test_a_folder_that_cannot_be(out: str, place: Path) -> None:
    refused(tried("--out", out), (1, 2), re.escape(out.split("/run")[0]))
    assert (place / "text.txt").read_text().startswith(text_file(place).read_text()[:10])


def test_a_run_that_is_there_is_not_overwritten(place: Path) -> None:
    assert tried().code == 0
    before = {path.name: path.read_bytes() for path in (place / "run").iterdir()}
    refused(tried("--seed", 9), (1, 2), "run", "--overwrite", "--resume")
    assert {path.name: path.read_bytes() for path in (place / "run").iterdir()} == before
    first = losses(place / "run")
    done = tried("--seed", 9, "--overwrite")
    assert done.code == 0 and losses(place / "run") != first and len(steps(place / "run")) == 3


def test_a_folder_of_other_things_is_left_alone(place: Path) -> None:
    (place / "run").mkdir()
    (place / "run" / "thesis.txt").write_text("years of work")
    tried("--overwrite")
    assert (place / "run" / "thesis.txt").read_text() == "years of work"


def test_a_checkpoint_of_another_model(place: Path) -> None:
    ran("from-scratch", "text.txt", *TINY, "--ctx", 32, "--iters", 2, "--out", "small")
    taken = "small/checkpoint-LATEST.gguf"
    refused(tried("--checkpoint-in", taken, "--embd", 64), (1, 2), "embd|64")
    write_arrays(
        place / "adapter.gguf",
        llama_metadata() | {"general.type": string("adapter")},
        {"a.lora_a": np.zeros((2, 2), "f4")},
    )
    for option in ("--resume", "--checkpoint-in"):
        refused(run("from-scratch", "text.txt", option, "adapter.gguf", "--out", "run"), (1, 2), "adapter")
    weights = llama_tensors()
    weights["blk.0.ffn_up.weight"] = weights["blk.0.ffn_up.weight"][:, :16].copy()
    write_arrays(place / "odd.gguf", llama_metadata(), weights)
    refused(
        run("from-scratch", "text.txt", "--checkpoint-in", "odd.gguf", "--out", "run"),
        1,
        "odd.gguf",
        "ffn_up",
    )


def test_damaged_checkpoints_without_a_good_one(place: Path) -> None:
    ran("from-scratch", "text.txt", *TINY, "--ctx", 32, "--iters", 2, "--out", "run")
    for path in (place / "run").glob("checkpoint-*.gguf"):
        path.write_bytes(path.read_bytes()[:3000])
    refused(run("from-scratch", "--resume", "run"), 1, "checkpoint|run")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("iters = 3\nembedding = 5\n", ("embedding",)),
        ("iters = 'many'\n", ("iters",)),
        ("lr = true\n", ("lr",)),
        ("iters = 2.5\n", ("iters",)),
        ("optimizer = 'adam-like'\n", ("optimizer", "adam-like")),
        ("iters = \n", ("line 1",)),
        ("iters = 3\niters = 4\n", ("line 2|iters",)),
        ("seed = [1]\n", ("seed",)),
        ("\x00", ("my.toml",)),
        ("lr = 1e999\n", ("lr|rate",)),
    ],
)
def test_configs_that_cannot_be(config: str, words: tuple[str, ...], place: Path) -> None:
    (place / "my.toml").write_text(config)
    refused(run("from-scratch", "text.txt", "--config", "my.toml", "--out", "run"), (1, 2), *words)
    assert lines(place / "run") == 0


def test_a_config_that_is_no_text(place: Path) -> None:
    (place / "my.toml").write_bytes(b"lr = \xff\n")
    refused(run("from-scratch", "text.txt", "--config", "my.toml", "--out", "run"), (1, 2), "my.toml")
    refused(run("from-scratch", "text.txt", "--config", ".", "--out", "run"), (1, 2))


# ---- disks -----------------------------------------------------------------


def limited(size: int, *arguments: Argument) -> Done:
    """A run that can write no file of more bytes than this."""
    done = subprocess.run(
        [*PROGRAM, *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
    )
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("size", [0, 100_000])
def test_a_full_disk_shows_before_the_first_step(size: int, place: Path) -> None:
    done = limited(size, "from-scratch", "text.txt", *TINY, "--ctx", 32, "--iters", 5, "--out", "run")
    refused(done, 1)
    assert lines(place / "run") == 0
    left = [path.name for path in (place / "run").glob("*")] if (place / "run").exists() else []
    assert not [name for name in left if name.endswith(".gguf") or "tmp" in name or name.startswith(".")], (
        left
    )


def test_a_disk_that_fills_up_later(place: Path) -> None:
    """The last good checkpoint stays, and is gone on with when there is room again."""
    command = ("from-scratch", "text.txt", *TINY, "--ctx", 32, "--iters", 60, "--save-every", 5)
    with started(*command, "--out", "run") as process:
        until(lambda: lines(place / "run") >= 12, process)
        _, most = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100_000, most))
        done = finished(process)
    refused(done, 1)
    assert not [
        path.name for path in (place / "run").iterdir() if "tmp" in path.name or path.name.startswith(".")
    ]
    ran("from-scratch", "--resume", "run")
    ran(*command, "--out", "whole")
    assert losses(place / "run") == losses(place / "whole")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(place: Path) -> None:
    (place / "mine").mkdir(mode=0o500)
    refused(tried("--out", "mine/run"), 1, "mine")


# ---- losses that are no numbers --------------------------------------------


def test_a_rate_that_blows_up(place: Path) -> None:
    """Stops with the step, the first bad tensor and the last good checkpoint, from which one can go on."""
    done = tried("--lr", 1e9, "--clip", 0, "--iters", 50, "--save-every", 1, "--warmup", 0)
    refused(done, 1, r"step \d+", r"blk\.\d|token_embd|output", r"checkpoint-\w+\.gguf")
    named = re.findall(r"[^\s'\"]*checkpoint-\w+\.gguf", done.errors[0])
    assert (place / named[0]).exists()
    assert all(np.isfinite(array).all() for array in tensors(place / named[0]).values())
    assert all(np.isfinite(losses(place / "run")))


def test_a_rate_that_blows_up_with_the_defaults(place: Path) -> None:
    done = tried("--lr", 1e9, "--iters", 200)
    refused(done, 1, r"step \d+", r"checkpoint-\w+\.gguf")


def test_lbfgs_that_cannot_go_on_says_so(place: Path) -> None:
    weights = llama_tensors()
    weights["output.weight"][0, 0] = np.nan
    write_arrays(place / "nan.gguf", llama_metadata(), weights)
    for optimizer in ("lbfgs", "adamw", "sgd"):
        more = ("--checkpoint-in", "nan.gguf", "--ctx", 32, "--iters", 3, "--optimizer", optimizer)
        refused(
            run("from-scratch", "text.txt", *more, "--out", f"run-{optimizer}"),
            1,
            "output.weight|step 1|nan.gguf",
        )
