"""A finetuning that is killed and gone on with: the same bits as one that nothing happened to."""

import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from llamatrain.adapters import peft
from llamatrain.checkpoints.read import read_checkpoint
from llamatrain.model.rope import Rope
from tests.helpers.adapter_files import adapter, ggla
from tests.helpers.cli import (
    Argument,
    lines,
    losses,
    metrics,
    ran,
    run,
    same_bits,
    steps,
    text_file,
    timeless,
)
from tests.helpers.lora_runs import base, new_weights, random_adapter
from tests.helpers.small_models import small
from tests.run.test_from_scratch_errors import refused
from tests.run.test_resume import kill_at

H = small()
ALL_ON = (
    "--batch",
    2,
    "--grad-acc",
    3,
    "--ctx",
    32,
    "--val-split",
    0.05,
    "--eval-every",
    7,
    "--seed",
    5,
    "--save-every",
    3,
)
WAYS: dict[str, tuple[str, tuple[Argument, ...]]] = {
    "quantised, with dropout": ("Q4_0", ("--lora-dropout", 0.3, "--remat", "block")),
    "mixed": (
        "Q8_0",
        (
            "--lora-scaled",
            "mixed.gguf",
            0.5,
            "--lora-rank-of",
            "attn_q=3",
            "--lora-plus-ratio",
            4,
            "--rslora",
        ),
    ),
    "gone on from an adapter": ("F32", ("--lora-init", "mixed.gguf")),
    "bf16": ("Q4_0", ("--precision", "bf16", "--cache-base", "bf16", "--lora-dropout", 0.1)),
    "full": ("F16", ("--full",)),
    "momentum": ("Q5_1", ("--optimizer", "sgd", "--beta1", 0.5)),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path)
    random_adapter(tmp_path / "mixed.gguf", H, ["blk.0.attn_v.weight", "blk.1.attn_v.weight"])
    return tmp_path


def arguments(out: str, way: str, iters: int) -> list[Argument]:
    kind, more = WAYS[way]
    precision = () if "--precision" in more else ("--precision", "f32")
    if not Path(f"{kind}.gguf").exists():
        base(Path(f"{kind}.gguf"), H, kind)
    return [
        "finetune",
        f"{kind}.gguf",
        "text.txt",
        *ALL_ON,
        "--lr",
        1e-2,
        *precision,
        *more,
        "--iters",
        iters,
        "--out",
        out,
    ]


def alike(one: str, other: str) -> None:
    assert timeless(Path(one)) == timeless(Path(other))
    for name in ("adapter.gguf", "model.gguf"):
        assert (Path(one) / name).exists() == (Path(other) / name).exists()
        if (Path(one) / name).exists():
            same_bits(Path(one) / name, Path(other) / name)


@pytest.mark.parametrize(
    "way", [way if i == 0 else pytest.param(way, marks=pytest.mark.slow) for i, way in enumerate(WAYS)]
)
def test_killed_at_any_moment(way: str, place: Path) -> None:
    ran(*arguments("whole", way, 40))
    command, alive, chance, folder = arguments("killed", way, 40), 0, random.Random(2), place / "killed"
    for _ in range(2):
        least, pause = lines(folder) + chance.randint(1, 8), chance.random() * 0.03

        def moment(least: int = least, pause: float = pause) -> bool:
            there = lines(folder) >= least
            time.sleep(pause if there else 0)
            return there

        alive += kill_at(moment, *command)
        if (folder / "checkpoint-LATEST.gguf").exists():
            command = ["finetune", "--resume", folder]
        elif folder.exists():
            shutil.rmtree(folder)
    ran("finetune", "--resume", folder)
    assert alive and [line["step"] for line in steps(folder)] == list(range(1, 41))
    alike("whole", "killed")


@pytest.mark.parametrize(
    "way", [way if i < 3 else pytest.param(way, marks=pytest.mark.slow) for i, way in enumerate(WAYS)]
)
def test_some_steps_and_then_the_rest(way: str, place: Path) -> None:
    schedule = ("--warmup", 2, "--decay-steps", 18)
    ran(*arguments("whole", way, 20), *schedule)
    ran(*arguments("parts", way, 11), *schedule)
    assert len(steps(place / "parts")) == 11
    ran("finetune", "--resume", "parts", "--iters", 20)
    assert losses(place / "whole") == losses(place / "parts")
    for name in ("adapter.gguf", "model.gguf"):
        if (place / "whole" / name).exists():
            same_bits(place / "whole" / name, place / "parts" / name)


def test_line_0_is_there_once(place: Path) -> None:
    ran(*arguments("run", "mixed", 4))
    ran("finetune", "--resume", "run", "--iters", 6)
    found = [line["step"] for line in metrics(place / "run") if "val_loss" in line]
    assert found.count(0) == 1 and found == sorted(found)


def test_what_has_changed_meanwhile(place: Path) -> None:
    """A base or an adapter that is not the one of the run's begin."""
    ran(*arguments("run", "mixed", 3))
    Path("Q8_0.gguf").rename("kept.gguf")
    refused(run("finetune", "--resume", "run", "--iters", 5), 1, "Q8_0.gguf")
    for arrays in (new_weights(small(ff=128)), new_weights(H, seed=2)):
        base(Path("Q8_0.gguf"), small(ff=len(arrays["blk.0.ffn_up.weight"])), "Q8_0", arrays)
        refused(run("finetune", "--resume", "run", "--iters", 5), 1, "Q8_0.gguf")
    Path("kept.gguf").rename("Q8_0.gguf")
    random_adapter(Path("mixed.gguf"), H, ["blk.0.attn_v.weight", "blk.1.attn_v.weight"], size=0.2)
    refused(run("finetune", "--resume", "run", "--iters", 5), 1, "mixed.gguf")
    Path("mixed.gguf").unlink()
    refused(run("finetune", "--resume", "run", "--iters", 5), 2, "mixed.gguf")
    assert len(steps(place / "run")) == 3


def test_runs_of_the_other_command(place: Path) -> None:
    ran(*arguments("run", "mixed", 3))
    refused(run("from-scratch", "--resume", "run", "--iters", 5), (1, 2), "finetune")
    ran(
        "from-scratch",
        "text.txt",
        "--size",
        "tiny",
        "--vocab-size",
        "bytes",
        "--iters",
        2,
        "--ctx",
        32,
        "--out",
        "new",
    )
    refused(run("finetune", "--resume", "new", "--iters", 5), (1, 2), "from-scratch")


# ---- what else may have changed, and what may not --------------------------


def went_on(iters: int, *more: Argument) -> str:
    return ran("finetune", "--resume", "run", "--iters", iters, *more).err


@pytest.mark.parametrize("source", ["theirs", "theirs.bin"])
def test_begun_from_adapters_of_others(source: str, place: Path) -> None:
    """PEFT's alpha is a whole number there, as is the ancestor's."""
    if source == "theirs":
        ran(*arguments("first", "mixed", 2), "--peft", "theirs")
    else:
        (place / source).write_bytes(ggla(adapter(H, ["blk.0.attn_v.weight", "blk.1.attn_v.weight"]), 4, 8))
    begun = [
        *arguments("", "gone on from an adapter", 4)[:-4],
        "--lora-init",
        source,
        "--schedule",
        "constant",
    ]
    ran(*begun, "--iters", 4, "--out", "whole")
    ran(*begun, "--iters", 2, "--out", "run")
    went_on(4)
    same_bits(place / "whole" / "adapter.gguf", place / "run" / "adapter.gguf")


def test_a_base_and_adapters_that_were_moved(place: Path) -> None:
    ran(*arguments("run", "mixed", 2))
    Path("Q8_0.gguf").rename("moved.gguf")
    Path("mixed.gguf").rename("there.gguf")
    ran("finetune", "moved.gguf", "--resume", "run", "--iters", 3, "--lora-scaled", "there.gguf", 0.5)
    went_on(4)  # it is known from then on
    assert len(steps(place / "run")) == 4
    refused(
        run("finetune", "--resume", "run", "--iters", 5, "--lora-scaled", "there.gguf", 0.25),
        1,
        "there.gguf",
        "changed-input",
    )
    base(Path("moved.gguf"), small(rope=Rope(16, base=1e6)), "Q8_0")
    refused(
        run("finetune", "--resume", "run", "--iters", 5),
        1,
        "moved.gguf",
        "checkpoint-4.gguf",
        "changed-input",
    )


def test_the_same_options_again(place: Path) -> None:
    ran(*arguments("run", "mixed", 2))
    given = ("--lora-scaled", "mixed.gguf", 0.5, "--lora-rank-of", "attn_q=3", "--lora-alpha", 8, "--ctx", 32)
    went_on(3, *given)
    for option, value, had in (
        ("--lora-rank-of", "attn_q=4", "attn_q=3"),
        ("--target", "attn_q", "none"),
        ("--lora-alpha", 9, "8"),
    ):
        refused(run("finetune", "--resume", "run", option, value), 2, option, f"it is {had}", "fixed-option")


def test_a_whole_model_needs_its_base_no_more(place: Path) -> None:
    for out, iters in (("whole", 4), ("run", 2)):
        ran(*arguments(out, "full", iters), "--schedule", "constant")
    Path("F16.gguf").unlink()
    went_on(4)
    same_bits(place / "whole" / "model.gguf", place / "run" / "model.gguf")
    refused(run("finetune", "mixed.gguf", "--resume", "run", "--iters", 5), 2, "--full", "mixed.gguf")
    refused(run("finetune", "--resume", "run", "--peft", "theirs"), 2, "--peft", "--full")


def test_copies_of_the_base_are_decided_once(place: Path) -> None:
    bf16 = ("--precision", "bf16")
    ran(*arguments("run", "momentum", 2), *bf16)
    assert kept_options(place / "run")["tune"]["cache_base"] == "bf16"
    assert "--cache-base" not in went_on(3) and kept_options(place / "run")["tune"]["cache_base"] == "bf16"
    said = went_on(4, "--cache-base", "off")
    assert "--cache-base is now off (it was bf16)" in said and "results will differ slightly" in said
    ran(*arguments("f32", "momentum", 2))
    assert kept_options(place / "f32")["tune"]["cache_base"] == "off"


def kept_options(folder: Path) -> dict[str, Any]:
    return read_checkpoint(folder / "checkpoint-LATEST.gguf").options


def test_only_the_adapter(place: Path) -> None:
    """Neither data nor anything else of a run is needed for it, or made."""
    ran(*arguments("run", "mixed", 2), "--peft", "own")
    Path("text.txt").unlink()
    ran("finetune", "--resume", "run", "--only-write-lora", "--out", "first")
    refused(
        run("finetune", "--resume", "run", "--only-write-lora", "--out", "second", "--peft", "own"),
        1,
        "own",
        "already",
    )
    assert not Path("second").exists()
    ran("finetune", "--resume", "run", "--only-write-lora", "--out", "other", "--peft", "theirs")
    assert [path.name for path in Path("other").iterdir()] == ["adapter.gguf"] and (
        place / "theirs" / peft.WEIGHTS
    ).exists()
    same_bits(place / "run" / "adapter.gguf", place / "other" / "adapter.gguf")
    refused(
        run("finetune", "Q8_0.gguf", "--only-write-lora", "--out", "new"), 2, "--only-write-lora", "--resume"
    )
    assert not Path("new").exists()


def test_a_folder_for_peft_is_nobody_elses(place: Path) -> None:
    ran(*arguments("run", "mixed", 2), "--peft", "theirs")
    before = (place / "theirs" / peft.WEIGHTS).read_bytes()
    refused(
        run(*arguments("two", "mixed", 2), "--lora", "theirs", "--peft", "./theirs"),
        2,
        "--peft",
        "theirs",
        "replaces-input",
    )
    refused(run(*arguments("two", "mixed", 2), "--peft", "theirs"), 1, "theirs", "--overwrite")
    Path("pickled").mkdir()
    (Path("pickled") / peft.PICKLE).touch()
    refused(
        run("finetune", "--resume", "run", "--iters", 3, "--peft", "pickled"),
        1,
        "pickled",
        "choose another --peft",
    )
    Path("file").touch()
    refused(run(*arguments("two", "mixed", 2), "--peft", "file/under"), 1, "file/under", "write-failed")
    assert not Path("two").exists()
    ran("finetune", "--checkpoint-in", "run/checkpoint-2.gguf", "--iters", 3, "--out", "two")
    assert (place / "theirs" / peft.WEIGHTS).read_bytes() == before  # of the other run
    assert "is not written to" in went_on(3)  # only the checkpoint names it
    assert (place / "theirs" / peft.WEIGHTS).read_bytes() == before
    went_on(4, "--peft", "theirs")
    assert (place / "theirs" / peft.WEIGHTS).read_bytes() != before


def test_another_precision_needs_no_copies(place: Path) -> None:
    ran(*arguments("run", "momentum", 2), "--precision", "bf16")
    said = went_on(3, "--precision", "f32")
    assert (
        "--precision is now f32 (it was bf16)" in said
        and "--cache-base is now off" in said
        and "results will differ slightly" in said
    )
    assert kept_options(place / "run")["tune"]["cache_base"] == "off"


def test_what_is_in_the_way_is_named(place: Path) -> None:
    ran(*arguments("run", "mixed", 2))
    ran("finetune", "text.txt", "--resume", "run", "--iters", 3)  # no base, but the data again
    Path("Q8_0.gguf").rename("moved.gguf")
    refused(
        run("finetune", "--resume", "run", "--iters", 4),
        1,
        "Q8_0.gguf",
        "moved",
        "finetune BASE.gguf --resume run",
    )
    refused(
        run("finetune", "--checkpoint-in", "moved.gguf", "text.txt", "--lora-r", 4),
        2,
        "--checkpoint-in",
        "--lora-r",
        "first",
    )
    refused(
        run("finetune", "moved.gguf", "--resume", "run", "--only-write-lora", "--overwrite"), 2, "--overwrite"
    )
