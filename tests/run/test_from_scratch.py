"""What a run of `from-scratch` says and leaves: metrics, lines, pictures, the model, checkpoints."""

import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from llamatrain.gguf.reader import open_gguf
from tests.helpers.cli import (
    PROGRAM,
    TINY,
    Argument,
    Done,
    environment,
    lines,
    losses,
    metrics,
    ran,
    run,
    started,
    steps,
    tensors,
    text,
    text_file,
    until,
)

ITERS, BATCH, ACC, CTX = 12, 2, 2, 32


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """One run with all there is to report."""
    place = tmp_path_factory.mktemp("from-scratch")
    data = text_file(place)
    sizes = ("--batch", BATCH, "--grad-acc", ACC, "--ctx", CTX, "--iters", ITERS, "--seed", 5)
    watched = (
        "--val-split",
        0.05,
        "--eval-every",
        5,
        "--sample-every",
        6,
        "--sample-prompt",
        "the ",
        "--save-every",
        4,
    )
    told = ("--report-every", 1)
    done = ran("from-scratch", data, *TINY, *sizes, *watched, *told, "--out", place / "run")
    return place / "run", done


# ---- metrics.jsonl ---------------------------------------------------------


def test_metrics_are_as_documented(whole: tuple[Path, Done]) -> None:
    of_speed = ["tokens", "seconds", "tokens_per_second", "seconds_waited"]
    keys = {
        "loss": ["step", "loss", "lr", "grad_norm", *of_speed, "epoch", "sample", "samples", "total_seconds"],
        "val_loss": [
            "step",
            "val_loss",
            "val_tokens",
            "val_loss_error",
            "val_accuracy",
            "val_accuracy_error",
        ],
    }
    counts = {"step", "tokens", "val_tokens", "epoch", "sample", "samples"}
    lowest = math.inf
    for line in metrics(whole[0]):
        if line.get("val_loss", math.inf) < lowest:
            assert line.pop("best") is True
            lowest = line["val_loss"]
        assert list(line) == keys["loss" if "loss" in line else "val_loss"]
        for key, value in line.items():
            assert type(value) is (int if key in counts else float), (key, value)
            assert math.isfinite(value)
    told = steps(whole[0])
    assert [line["step"] for line in told] == list(range(1, ITERS + 1))
    assert [line["tokens"] for line in told] == [BATCH * ACC * CTX * step for step in range(1, ITERS + 1)]
    assert all(line["grad_norm"] > 0 and line["lr"] > 0 for line in told)
    for line in told:
        assert line["tokens_per_second"] == pytest.approx(BATCH * ACC * CTX / line["seconds"], rel=0.05)


def test_metrics_have_the_same_keys_where_nothing_is_clipped(tmp_path: Path) -> None:
    for number, more in enumerate(
        (("--clip", 0), ("--clip", 0, "--optimizer", "sgd"), ("--clip", 0, "--grad-acc", 2))
    ):
        folder = tmp_path / str(number)
        ran("from-scratch", text_file(tmp_path), *TINY, "--ctx", 32, "--iters", 2, *more, "--out", folder)
        assert all(line.get("grad_norm", 0) > 0 for line in steps(folder)), more


def test_validation_comes_when_it_is_due(whole: tuple[Path, Done]) -> None:
    validated = [line for line in metrics(whole[0]) if "val_loss" in line]
    assert [line["step"] for line in validated if line["step"] % 5 == 0] == [5, 10]
    assert len({line["val_tokens"] for line in validated}) == 1
    places = [("val_loss" in line, line["step"]) for line in metrics(whole[0])]
    assert places.index((True, 5)) > places.index((False, 5)), "after its step"


def test_masked_tokens_count_and_padding_does_not(tmp_path: Path) -> None:
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps({"prompt": "abc", "completion": "defg"}) + "\n" for _ in range(8)))
    rows = ("--batch", 4, "--ctx", 32, "--no-pack")
    ran("from-scratch", data, *TINY, *rows, "--iters", 2, "--out", tmp_path / "run")
    ran("from-scratch", data, *TINY, *rows, "--iters", 0, "--out", tmp_path / "first")
    shown = ran("preview", data, "--model", tmp_path / "first" / "model.gguf", *rows, "-n", 4)
    used = [int(found) for found in re.findall(r"row \d+: (\d+) of", shown.out)]
    assert sum(used) < 4 * 32
    assert [line["tokens"] for line in steps(tmp_path / "run")] == [sum(used), 2 * sum(used)]


# ---- what is said ----------------------------------------------------------


def test_nothing_on_stdout_and_no_control_characters(whole: tuple[Path, Done]) -> None:
    out, err = whole[1].out, whole[1].err
    assert out == ""
    assert "\x1b" not in err and "\r" not in err
    assert "warning" not in err.lower() and "error" not in err.lower()


def test_the_header_says_what_is_trained(whole: tuple[Path, Done]) -> None:
    head = whole[1].err[:3000].lower()
    count = sum(array.size for array in tensors(whole[0] / "model.gguf").values())
    said = {"layers": "2 layers", "width": "32", "threads": "thread", "memory": "memory", "precision": "f32"}
    assert not [name for name, word in said.items() if word not in head], head
    assert str(whole[0]) in whole[1].err
    numbers = re.sub(r"(?<=\d)[,_'](?=\d)", "", head)
    assert str(count) in numbers or f"{count / 1000:.1f}" in numbers or f"{count / 1e6:.2f}" in numbers, (
        count,
        head,
    )


def test_lines_are_aligned(whole: tuple[Path, Done]) -> None:
    told = [line for line in whole[1].err.splitlines() if "tok/s" in line and "loss" in line]
    assert len(told) == ITERS, whole[1].err
    for label in ("loss", "tok/s", "lr"):
        places = {line.index(label) for line in told}
        assert len(places) == 1, (label, told)
    assert len({len(line.rstrip()) for line in told}) <= 2, told


def test_validation_and_samples_are_shown(whole: tuple[Path, Done]) -> None:
    err = whole[1].err
    assert len(re.findall(r"val", err)) >= 2
    assert err.count("the ") >= 2, "samples begin with their prompt"


def test_the_loss_curve_is_a_picture(whole: tuple[Path, Done]) -> None:
    picture = ElementTree.parse(whole[0] / "loss.svg").getroot()
    assert picture.tag.endswith("svg")
    drawn = [each for each in picture.iter() if each.tag.endswith(("polyline", "path"))]
    assert drawn, "no curve"


# ---- what is left ----------------------------------------------------------


def test_the_folder_holds_the_run(whole: tuple[Path, Done]) -> None:
    names = {path.name for path in whole[0].iterdir()}
    assert {
        "config.toml",
        "metrics.jsonl",
        "checkpoint-LATEST.gguf",
        "model.gguf",
        "loss.svg",
        "report.html",
        "samples.jsonl",
    } <= names
    numbered = {name for name in names if re.fullmatch(r"checkpoint-\d+\.gguf", name)}
    names -= {name for name in names if re.fullmatch(r"best(-\d+)?\.gguf", name)}
    assert len(numbered) == 2, "--keep is 2"
    drawn = {"loss.svg", "report.html", "report.json", "samples.jsonl"}
    assert names - numbered <= {
        "config.toml",
        "metrics.jsonl",
        "checkpoint-LATEST.gguf",
        "model.gguf",
        *drawn,
    }
    latest = (whole[0] / "checkpoint-LATEST.gguf").stat()
    assert latest.st_nlink == 2 and latest.st_ino in {(whole[0] / name).stat().st_ino for name in numbered}


def test_the_resolved_options_are_a_config(whole: tuple[Path, Done], tmp_path: Path) -> None:
    """Given again, they make the same run."""
    resolved = tomllib.loads((whole[0] / "config.toml").read_text())
    flat = json.dumps(resolved)
    assert '"embd": 32' in flat and '"seed": 5' in flat and '"optimizer": "adamw"' in flat
    data = whole[0].parent / "text.txt"
    again = run("from-scratch", data, "--config", whole[0] / "config.toml", "--out", tmp_path / "again")
    assert again.code == 0, again.err
    assert losses(tmp_path / "again") == losses(whole[0])


def test_the_checkpoint_speaks_the_ancestors_words(whole: tuple[Path, Done]) -> None:
    found = open_gguf(whole[0] / "checkpoint-LATEST.gguf")
    assert found.kind == "checkpoint" and found.metadata["training.type"] == "train_model"
    assert found.get_value("training.iteration_count", int) == ITERS
    assert found.get_value("training.token_count", int) == ITERS * BATCH * ACC * CTX
    assert found.get_value("optimizer.type", str) == "adam"
    assert math.isfinite(found.get_value("optimizer.adam.best_loss", float))
    count = found.get_value("optimizer.parameter_count", int)
    for name in ("first_moments", "second_moments"):
        assert found.tensors[f"optimizer.adam.{name}"].shape == (count,)
    ran("inspect", whole[0] / "checkpoint-LATEST.gguf")


def test_the_model_is_plain_gguf(whole: tuple[Path, Done]) -> None:
    found = open_gguf(whole[0] / "model.gguf")
    assert found.kind == "model" and found.metadata["general.architecture"] == "llama"
    assert not [key for key in found.metadata if key.startswith(("training.", "optimizer."))]
    weights = tensors(whole[0] / "model.gguf")
    assert all(np.isfinite(array).all() for array in weights.values())
    in_checkpoint = tensors(whole[0] / "checkpoint-LATEST.gguf")
    assert all(np.array_equal(array, in_checkpoint[name]) for name, array in weights.items())


def test_each_run_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = text_file(tmp_path)
    for number in (1, 2):
        ran("from-scratch", data, *TINY, "--ctx", 32, "--iters", 1)
        assert (tmp_path / "runs" / f"from-scratch-{number}" / "model.gguf").exists()


def test_no_step_at_all(tmp_path: Path) -> None:
    """`--iters 0` writes the first weights: finite, and those of the seed."""
    data, made = text_file(tmp_path), {}
    for name, seed in (("one", 1), ("two", 1), ("three", 2)):
        ran("from-scratch", data, *TINY, "--ctx", 32, "--iters", 0, "--seed", seed, "--out", tmp_path / name)
        made[name] = tensors(tmp_path / name / "model.gguf")
        assert lines(tmp_path / name) == 0
    for name, array in made["one"].items():
        assert np.array_equal(array, made["two"][name]) and np.isfinite(array).all()
    assert not np.array_equal(made["one"]["output.weight"], made["three"]["output.weight"])


# ---- how long it goes on ---------------------------------------------------


def test_epochs(tmp_path: Path) -> None:
    data = tmp_path / "lines.jsonl"
    data.write_text("".join(json.dumps({"text": text(20, seed)}) + "\n" for seed in range(8)))
    ran("from-scratch", data, *TINY, "--batch", 2, "--ctx", 32, "--epochs", 3, "--out", tmp_path / "run")
    assert len(steps(tmp_path / "run")) == 3 * 8 // 2


def test_max_time(tmp_path: Path) -> None:
    more = ("--ctx", 64, "--batch", 8, "--iters", 1_000_000, "--max-time", "2s")
    begun = time.monotonic()
    ran("from-scratch", text_file(tmp_path), *TINY, *more, "--out", tmp_path / "run")
    took = [line["seconds"] for line in steps(tmp_path / "run")]
    assert sum(took[:-1]) < 2 < time.monotonic() - begun, "the step in which it is up is the last one"
    assert (tmp_path / "run" / "model.gguf").exists() and len(steps(tmp_path / "run")) > 3


def test_a_stop_rule_says_why(tmp_path: Path) -> None:
    more = ("--ctx", 32, "--iters", 300, "--max-no-improvement", 1, "--lr", 0.05)
    done = ran("from-scratch", text_file(tmp_path), *TINY, *more, "--out", tmp_path / "run")
    assert len(steps(tmp_path / "run")) < 300 and "no loss below" in done.err


def test_an_existing_model_is_trained_on(whole: tuple[Path, Done], tmp_path: Path) -> None:
    data, model = whole[0].parent / "text.txt", whole[0] / "model.gguf"
    common = ("--batch", 4, "--ctx", CTX, "--seed", 5, "--iters")
    ran("from-scratch", data, "--checkpoint-in", model, *common, 0, "--out", tmp_path / "none")
    first, weights = tensors(model), tensors(tmp_path / "none" / "model.gguf")
    assert all(np.array_equal(array, weights[name]) for name, array in first.items())
    ran("from-scratch", data, "--checkpoint-in", model, *common, 3, "--out", tmp_path / "some")
    assert steps(tmp_path / "some")[0]["step"] == 1
    assert losses(tmp_path / "some")[0] < losses(whole[0])[0]


def test_options_come_from_a_file_and_the_command_line_wins(tmp_path: Path) -> None:
    config = tmp_path / "some.toml"
    config.write_text(
        "embd = 48\nhead = 4\nlayer = 1\niters = 2\nctx = 32\nlr = 1e-4\nvocab-size = 'bytes'\n"
    )
    ran("from-scratch", text_file(tmp_path), "--config", config, "--iters", 3, "--out", tmp_path / "run")
    assert len(steps(tmp_path / "run")) == 3
    assert tensors(tmp_path / "run" / "model.gguf")["token_embd.weight"].shape[1] == 48
    assert max(line["lr"] for line in steps(tmp_path / "run")) == pytest.approx(1e-4)


# ---- on a terminal ---------------------------------------------------------


def on_a_terminal(*arguments: Argument, interrupt: Path | None = None) -> tuple[int, str, bool]:
    """Exit code, what was shown, and whether the terminal's settings are as before."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (40, 100))
    before = termios.tcgetattr(slave)
    shown, interrupted = bytearray(), False
    words = [*PROGRAM, *map(str, arguments)]
    with subprocess.Popen(
        words, env=environment(TERM="xterm-256color"), stdin=slave, stdout=slave, stderr=slave
    ) as process:
        try:
            end = time.monotonic() + 60
            while time.monotonic() < end:
                if select.select([master], [], [], 0.05)[0]:
                    shown += os.read(master, 1 << 16)
                elif process.poll() is not None:
                    break
                if interrupt and not interrupted and lines(interrupt) >= 3:
                    process.send_signal(signal.SIGINT)
                    interrupted = True
        finally:
            process.kill()
    after = termios.tcgetattr(slave)
    os.close(master)
    os.close(slave)
    return process.returncode, shown.decode("utf-8", "replace"), before == after


def in_order(shown: str) -> None:
    """The cursor is there, colours are off, the last line is ended."""
    assert shown.count("\x1b[?25l") <= shown.count("\x1b[?25h")
    assert shown.rfind("\x1b[?25l") <= shown.rfind("\x1b[?25h")
    colours = re.findall(r"\x1b\[([\d;]*)m", shown)
    assert not colours or colours[-1] in ("0", "", "39", "49")
    assert shown.count("\x1b[?1049h") == shown.count("\x1b[?1049l")
    assert re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", shown).endswith("\n")
    assert "Traceback" not in shown


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_terminal_shows_progress_and_is_left_in_order(interrupted: bool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    more = ("--ctx", 64, "--batch", 8, "--iters", 2000 if interrupted else 120, "--out", folder)
    code, shown, restored = on_a_terminal(
        "from-scratch", text_file(tmp_path), *TINY, *more, interrupt=folder if interrupted else None
    )
    assert code == (130 if interrupted else 0), shown[-2000:]
    assert re.search(r"\r|\x1b\[\d*[AKG]", shown), "nothing moves"
    assert restored
    in_order(shown)
    assert ("--resume" in shown) is interrupted or not interrupted


def test_a_reader_that_leaves_does_no_harm(tmp_path: Path) -> None:
    """Such as `2>&1 | head`: nobody reads what is said, and the training goes on, or saves and ends."""
    folder, more = tmp_path / "run", ("--ctx", 32, "--iters", 60, "--report-every", 1, "--save-every", 1000)
    with started("from-scratch", text_file(tmp_path), *TINY, *more, "--out", folder) as process:
        until(lambda: lines(folder) >= 10, process)
        assert process.stderr is not None
        process.stderr.close()
        process.wait(60)
    saved = open_gguf(folder / "checkpoint-LATEST.gguf").get_value("training.iteration_count", int)
    assert saved == len(steps(folder)) >= 10


def test_the_header_says_why_rows_are_skipped_and_where_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = [{"prompt": "?" * (60 if number < 5 else 3), "completion": "answer"} for number in range(9)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    said = " ".join(
        ran("from-scratch", "rows.jsonl", *TINY, "--ctx", 32, "--iters", 1, "--out", "run").err.split()
    )
    assert "5 skipped, without a token to train on within 32 tokens (rows.jsonl:1, 2, 3 and 2 more)" in said
    assert str(tmp_path) not in said
