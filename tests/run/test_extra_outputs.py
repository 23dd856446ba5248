"""What a run writes beside its folder at each save: `--checkpoint-out`, `--model-out`, `--lora-out`, and what stays of it."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest

import llamatrain
from llamatrain.gguf.reader import open_gguf
from tests.helpers.cli import (
    TINY,
    Argument,
    Done,
    lines,
    ran,
    run,
    same_bits,
    started,
    steps,
    tensors,
    text_file,
    until,
)
from tests.helpers.lora_runs import base
from tests.helpers.small_models import small
from tests.helpers.test_data import material

OUTS = ("--checkpoint-out", "chk-ITERATION.gguf", "--model-out", "m-ITERATION.gguf")
SHORT = (*TINY, "--layer", 1, "--ctx", 32, "--batch", 2, "--save-every", 2, "--sample-every", 0)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path, 3008)
    return tmp_path


def new(*more: Argument, iters: int = 4) -> Done:
    return ran("from-scratch", "text.txt", *SHORT, "--iters", iters, *more)


def there(pattern: str = "*.gguf") -> list[str]:
    return sorted(file.name for file in Path().glob(pattern))


def refused(*words: Argument) -> str:
    done = run(*words)
    assert done.code in (1, 2) and len(done.errors) == 1, done.err
    return done.errors[0]


def test_each_save_is_written_under_its_step_and_as_the_latest(place: Path) -> None:
    done = new(*OUTS, "--out", "it", iters=5)
    assert there() == [f"{stem}-{step}.gguf" for stem in ("chk", "m") for step in (2, 4, 5, "LATEST")]
    assert (
        Path("chk-5.gguf").read_bytes()
        == Path("chk-LATEST.gguf").read_bytes()
        == Path("it/checkpoint-5.gguf").read_bytes()
    )
    assert (
        Path("m-LATEST.gguf").read_bytes()
        == Path("it/model.gguf").read_bytes()
        != Path("m-2.gguf").read_bytes()
    )
    assert f"the model: it/model.gguf, {place}/chk-LATEST.gguf, {place}/m-LATEST.gguf" in done.err


def test_the_command_that_goes_on_names_them_again(place: Path) -> None:
    done = new(*OUTS, "--out", "it", "--max-time", "0.001s", iters=50)
    again = f"llamatrain from-scratch --resume it --checkpoint-out {place}/chk-ITERATION.gguf --model-out {place}/m-ITERATION.gguf"
    assert done.err.splitlines()[-1].endswith(f"resume with: {again}")


def test_other_words_may_stand_for_step_and_latest(place: Path) -> None:
    new(
        "--checkpoint-out",
        "c.XX.gguf",
        "--model-out",
        "m.gguf",
        "--pattern-fn-it",
        "XX",
        "--fn-latest",
        "new",
    )
    assert there() == ["c.2.gguf", "c.4.gguf", "c.new.gguf", "m.gguf"]


def test_a_run_that_goes_on_writes_them_where_they_are_named_again(place: Path) -> None:
    new(*OUTS, "--out", "it")
    done = ran("from-scratch", "--resume", "it", "--iters", 5)
    assert "chk-5.gguf" not in there() and "m-5.gguf" not in there()
    told = f"{place}/m-ITERATION.gguf is not written, since only the checkpoint names it; add --model-out {place}/m-ITERATION.gguf"
    assert told in done.err
    ran("from-scratch", "--resume", "it", "--iters", 6, *OUTS)
    assert (
        "m-6.gguf" in there() and open_gguf("chk-LATEST.gguf").get_value("training.iteration_count", int) == 6
    )
    ran("from-scratch", "--resume", "it", "--iters", 8, *OUTS[:2], "--model-out", "")
    assert "m-8.gguf" not in there() and "chk-8.gguf" in there()
    assert (
        tomllib.loads(Path("it/config.toml").read_text())["checkpoint-out"] == f"{place}/chk-ITERATION.gguf"
    )


def test_a_script_of_the_ancestors_runs_again_and_again(place: Path) -> None:
    """The same line each time, which goes on from LATEST: the first time there is none."""
    base(place / "V.gguf", small())
    script = "--vocab-model V.gguf --train-data text.txt --embd 32 --head 4 --layer 1 --ff 64 -c 32 -b 2 -t 1 --adam-iter 3 --seed 1"
    script += " --adam-alpha 1e-2 --warmup 2 --cos-decay-steps 20 --use-checkpointing --save-every 2 --checkpoint-in chk-LATEST.gguf"
    first = ran("train-from-scratch", *script.split(), *OUTS)
    assert "note: chk-LATEST.gguf does not exist yet: starting a new run" in first.err
    second = ran("train-from-scratch", *script.split(), *OUTS)
    assert "--adam-iter 3 is --iters 6 here" in second.err and "3 steps are done" in second.err
    assert {"m-3.gguf", "m-6.gguf", "chk-6.gguf"} <= {*there()}
    whole = script.replace("--adam-iter 3", "--iters 6").replace("chk-LATEST", "other-LATEST")
    ran("train-from-scratch", *whole.split(), "--out", "whole")
    same_bits(Path("m-LATEST.gguf"), Path("whole/model.gguf"))


def test_an_adapter_is_written_likewise(place: Path) -> None:
    base(place / "M.gguf", small())
    theirs = "--model-base M.gguf --train-data text.txt --lora-out lora-ITERATION.gguf --adam-iter 4 --adam-alpha 1e-3 -c 32 -b 4 -t 2"
    ran(
        "finetune",
        *theirs.split(),
        "--use-checkpointing",
        "--save-every",
        2,
        "--checkpoint-out",
        "c-ITERATION.gguf",
        "--out",
        "it",
    )
    assert there("lora*") == ["lora-2.gguf", "lora-4.gguf", "lora-LATEST.gguf"]
    assert open_gguf("lora-4.gguf").kind == "adapter" and open_gguf("c-2.gguf").kind == "checkpoint"
    ran("finetune", "--only-write-lora", "--checkpoint-in", "c-2.gguf", "--lora-out", "again.gguf")
    assert tensors(Path("again.gguf")).keys() == tensors(Path("lora-2.gguf")).keys()
    same_bits(Path("again.gguf"), Path("lora-2.gguf"))
    assert not Path("runs").exists()


def test_what_a_kill_left_undone_is_done_by_the_run_that_goes_on(place: Path) -> None:
    """Between a save and its copies."""
    more = ("--keep-results", 3)
    new(*OUTS, *more, "--out", "it")
    whole = Path("chk-4.gguf").read_bytes()
    for name in ("chk-4.gguf", "m-4.gguf", "chk-LATEST.gguf", "m-LATEST.gguf", "it/model-4.gguf"):
        Path(name).unlink()
    ran("from-scratch", "--resume", "it", *OUTS, "--iters", 5, "--save-every", 0)
    assert (
        len(whole) == Path("chk-4.gguf").stat().st_size
        and open_gguf("chk-4.gguf").get_value("training.iteration_count", int) == 4
    )
    assert there("m-*") == [f"m-{step}.gguf" for step in (2, 4, 5, "LATEST")]
    assert [Path(f"it/model-{step}.gguf").exists() for step in (4, 5)] == [True, True]


def test_a_sample_of_step_0_is_there_once(place: Path) -> None:
    """Also where a run was killed after it, and before its first save."""
    first = ("--sample-every", 2, "--out", "it")
    with started(
        "from-scratch", "text.txt", *SHORT, "--save-every", 0, "--iters", 100_000, *first
    ) as process:
        until(lambda: Path("it/samples.jsonl").exists() and lines(Path("it")) > 1, process)
        process.kill()
    ran("from-scratch", "--resume", "it", "--iters", 4)
    shown = [json.loads(line)["step"] for line in Path("it/samples.jsonl").read_text().splitlines()]
    assert shown == [0, 2, 4]
    ran("from-scratch", "--resume", "it", "--iters", 6)
    shown = [json.loads(line)["step"] for line in Path("it/samples.jsonl").read_text().splitlines()]
    assert shown == [0, 2, 4, 6]


# ---- what they may not replace ----------------------------------------------


def test_no_input_is_replaced(place: Path) -> None:
    base(place / "V-7.gguf", small())
    for out in ("V-ITERATION.gguf", "V-7.gguf", f"{place}/../{place.name}/V-7.gguf"):
        told = refused(
            "from-scratch",
            "text.txt",
            *TINY[2:],
            "--vocab-from",
            "V-7.gguf",
            "--model-out",
            out,
            "--overwrite",
        )
        assert "would replace the input" in told and "V-7.gguf; " in told and "[replaces-input]" in told
    assert "would replace" in refused(
        "from-scratch", "text.txt", *SHORT, "--checkpoint-out", "text.txt", "--overwrite"
    )
    assert Path("text.txt").stat().st_size == 3008 and not list(Path().glob("runs/*/*"))


def test_no_file_of_others_is_replaced_unsaid(place: Path) -> None:
    Path("m-12.gguf").write_text("mine")
    told = refused("from-scratch", "text.txt", *SHORT, "--iters", 2, *OUTS)
    assert told.startswith(f"error: {place}/m-12.gguf ") and told.endswith(" [output-exists]")
    assert "--model-out" in told and "--overwrite" in told
    new(*OUTS, "--overwrite", iters=2)
    assert Path("m-12.gguf").read_text() == "mine" and "m-2.gguf" in there()
    ran("from-scratch", "text.txt", *SHORT, "--iters", 0, "--out", "other")
    told = refused("from-scratch", "--resume", "other", "--iters", 2, *OUTS)
    assert f"{place}/chk-2.gguf " in told and told.endswith(" [output-exists]")
    assert "--checkpoint-out" in told and "--overwrite" not in told


@pytest.mark.parametrize(
    ("out", "told"),
    [
        (("--model-out", "none/m.gguf"), "--model-out"),
        (
            ("--model-out", "m.gguf", "--checkpoint-out", "m.gguf"),
            "--checkpoint-out and --model-out name the same file",
        ),
        (("--model-out", "it/model.gguf"), "[replaces-own-file]"),
        (("--checkpoint-out", "it/checkpoint-ITERATION.gguf"), "[replaces-own-file]"),
        (("--lora-out", "a.gguf"), "--lora-out has no effect for a new model"),
        (("--fn-latest", ""), "--fn-latest must be a word (got '')"),
        (
            ("--model-out", "m.gguf", "--fn-latest", "../a"),
            "--fn-latest must be part of a file name (got '../a')",
        ),
    ],
)
def test_what_cannot_be(out: tuple[Argument, ...], told: str, place: Path) -> None:
    assert told in refused("from-scratch", "text.txt", *SHORT, "--iters", 2, "--out", "it", *out)
    assert not Path("it").exists() and there() == []


def test_a_checkpoint_that_is_not_there_is_an_error_but_for_the_latest(place: Path) -> None:
    for name in ("none.gguf", "none/chk-LATEST.gguf"):
        assert f"{name}: No such file" in refused("from-scratch", "text.txt", *SHORT, "--checkpoint-in", name)


def test_a_place_that_takes_no_file_any_more_costs_nothing_but_that_file(place: Path) -> None:
    """It is said, and the run goes on."""
    Path("outs").mkdir()
    Path("outs/m-2.gguf").mkdir()
    done = new("--model-out", "outs/m-ITERATION.gguf", "--overwrite", "--out", "it")
    assert "outs/m-2.gguf: this is a folder, a device or a pipe" in done.err
    assert "trying again at the next save" in done.err
    assert there("outs/m-4*") == ["m-4.gguf"] and len(steps(Path("it"))) == 4


def test_a_file_that_is_replaced_does_not_become_readable_for_others(place: Path) -> None:
    for name in ("m.gguf", "c-LATEST.gguf"):
        Path(name).touch(0o600)
        Path(name).chmod(0o600)
    new("--model-out", "m.gguf", "--checkpoint-out", "c-ITERATION.gguf", "--overwrite", "--out", "it")
    assert [Path(name).stat().st_mode & 0o777 for name in ("m.gguf", "c-LATEST.gguf")] == [0o600, 0o600]
    for name in ("model.gguf", "config.toml", "checkpoint-LATEST.gguf", "metrics.jsonl", "report.html"):
        Path("it", name).chmod(0o600)
    ran("from-scratch", "--resume", "it", "--iters", 6)
    for name in ("model.gguf", "config.toml", "checkpoint-LATEST.gguf", "metrics.jsonl", "report.html"):
        assert Path("it", name).stat().st_mode & 0o777 == 0o600, name


# ---- results that stay -------------------------------------------------------


def test_results_of_earlier_saves_stay(place: Path) -> None:
    new("--keep-results", 2, "--out", "it", iters=7)
    assert there("it/model*") == ["model-6.gguf", "model-7.gguf", "model.gguf"]
    same_bits(Path("it/model-7.gguf"), Path("it/model.gguf"))
    ran("from-scratch", "--resume", "it", "--iters", 8)
    assert there("it/model*") == ["model-7.gguf", "model-8.gguf", "model.gguf"]
    new("--overwrite", "--out", "it", iters=1)  # they belong to the run that is replaced
    assert there("it/model*") == ["model.gguf"] and not list(Path("it").glob(".replac*"))


def test_results_after_the_checkpoint_that_is_gone_on_from_are_put_aside(place: Path) -> None:
    new("--keep-results", 3, "--out", "it", iters=6)
    for step in (4, 6):
        Path(f"it/checkpoint-{step}.gguf").write_bytes(b"GGUF")
    Path("it/checkpoint-LATEST.gguf").unlink()
    new_ones = run("from-scratch", "--resume", "it")
    assert (
        new_ones.code == 1 and "no checkpoint to resume from" in new_ones.err
    )  # the first was removed by --keep
    new("--keep-results", 3, "--keep", 9, "--overwrite", "--out", "it", iters=6)
    Path("it/checkpoint-6.gguf").write_bytes(b"GGUF")
    ran("from-scratch", "--resume", "it", "--save-every", 0, "--iters", 5)
    assert there("it/model-*.gguf") == ["model-2.gguf", "model-4.gguf", "model-5.gguf"]


# ---- a model of a checkpoint --------------------------------------------------


def test_a_checkpoint_becomes_a_model_without_its_text(place: Path) -> None:
    new("--out", "it", iters=3)
    for name in ("text.txt", "it/model.gguf"):
        Path(name).unlink()
    shutil.copy("it/checkpoint-2.gguf", "c.gguf")
    told = ran(
        "from-scratch", "--only-write-model", "--checkpoint-in", "c.gguf", "--model-out", "m-ITERATION.gguf"
    ).err
    assert told == f"the model: {place}/m-LATEST.gguf\n"
    assert there("m*") == ["m-2.gguf", "m-LATEST.gguf"] and not Path("runs").exists()
    ran("from-scratch", "--only-write-model", "--resume", "it")
    assert (
        len(steps(Path("it"))) == 3
        and json.loads(ran("inspect", "--json", "it/model.gguf").out)["kind"] == "model"
    )
    run_ = llamatrain.from_scratch(resume="it", only_write_model=True)
    assert run_.result == Path("it/model.gguf") and run_.steps == 3


def test_a_checkpoint_of_the_ancestors_becomes_a_model(place: Path) -> None:
    theirs = material("ancestors/train-checkpoint.gguf")
    ran("from-scratch", "--only-write-model", "--checkpoint-in", theirs, "--model-out", "m.gguf")
    same_bits(Path("m.gguf"), material("ancestors/model.gguf"))


def test_only_what_a_run_makes_can_be_written(place: Path) -> None:
    assert "name it with --resume or --checkpoint-in" in refused("from-scratch", "--only-write-model")
    base(place / "M.gguf", small())
    told = refused("from-scratch", "--only-write-model", "--checkpoint-in", "M.gguf")
    assert "the model M.gguf" in told and told.endswith(" [no-checkpoint]")
    ran("finetune", "M.gguf", "text.txt", "--iters", 0, "--ctx", 32, "--out", "lora")
    assert "use --only-write-lora [wrong-checkpoint]" in refused(
        "finetune", "--only-write-model", "--resume", "lora"
    )
    ran("finetune", "M.gguf", "text.txt", "--full", "--iters", 1, "--ctx", 32, "--out", "full")
    same = Path("full/model.gguf").read_bytes()
    Path("full/model.gguf").unlink()
    ran("finetune", "--only-write-model", "--resume", "full")
    assert Path("full/model.gguf").read_bytes() == same
