"""`--retain-data`: data whose loss shows what a run forgets, beside the validation, which alone chooses the best."""

import json
from pathlib import Path

import pytest

import llamatrain
from llamatrain.report.metrics import Metrics
from tests.helpers.cli import TINY, Argument, losses, metrics, ran, run, same_bits, text_file
from tests.run.test_from_scratch_errors import refused

SHAPE = (*TINY, "--ctx", 32, "--batch", 4, "--lr", 5e-3, "--iters", 12, "--eval-every", 4, "--save-every", 4)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path, 2000)
    (tmp_path / "val.txt").write_text((tmp_path / "text.txt").read_text()[:320])
    (tmp_path / "old.txt").write_text("What was known before must stay known. " * 12)
    return tmp_path


def train(out: str, *more: Argument) -> None:
    ran("from-scratch", "text.txt", *SHAPE, "--out", out, *more)


def retained(folder: str) -> list[tuple[int, float]]:
    return [(line["step"], line["retain_loss"]) for line in metrics(Path(folder)) if "retain_loss" in line]


def test_it_changes_no_bits(place: Path) -> None:
    """The weights, the losses, the validations and the best step are those without it."""
    train("without", "--val", "val.txt")
    train("with", "--val", "val.txt", "--retain-data", "old.txt")
    same_bits(place / "without" / "model.gguf", place / "with" / "model.gguf")
    same_bits(place / "without" / "best.gguf", place / "with" / "best.gguf")
    assert losses(place / "without") == losses(place / "with")
    assert [step for step, _ in retained("with")] == [4, 8, 12]
    scored = [
        [
            {
                name: value
                for name, value in line.items()
                if name.startswith("val") or name in ("step", "best")
            }
            for line in metrics(place / name)
            if "val_loss" in line
        ]
        for name in ("without", "with")
    ]
    assert scored[0] == scored[1] and len(scored[0]) == 3


def test_its_loss_is_that_of_evaluate(place: Path) -> None:
    """It also works without validation data."""
    train("run", "--retain-data", "old.txt")
    lines = [line for line in metrics(Path("run")) if "retain_loss" in line]
    found = json.loads(ran("evaluate", "run/model.gguf", "old.txt", "--ctx", 32, "--json").out)
    assert lines[-1]["retain_loss"] == pytest.approx(found["loss"], rel=1e-6)
    assert lines[-1]["retain_tokens"] == found["tokens"]
    assert lines[-1]["retain_loss_error"] == pytest.approx(found["loss_error"], rel=1e-5)
    assert not any("val_loss" in line or "best" in line for line in metrics(Path("run")))
    assert not Path("run/best.gguf").exists()


def test_it_does_not_choose_the_best(place: Path) -> None:
    """Training on one text makes another less likely, while its own validation improves."""
    base = ("--retain-data", "old.txt", "--val", "val.txt")
    ran("from-scratch", "old.txt", *SHAPE, "--iters", 60, "--eval-every", 0, "--out", "old")
    tune = ("--lora-r", 4, "--lr", 3e-2, "--iters", 12, "--eval-every", 4, "--ctx", 32, "--batch", 4)
    done = ran("finetune", "old/model.gguf", "text.txt", *base, *tune, "--out", "tuned")
    found, best = retained("tuned"), [line["step"] for line in metrics(Path("tuned")) if line.get("best")]
    assert [step for step, _ in found] == [0, 4, 8, 12], "a base is scored before the first step, too"
    assert found[-1][1] > found[0][1] + 0.1 and best[-1] > 0
    assert f"loss of the retained data: {found[0][1]:.4f} → {found[-1][1]:.4f}" in done.err
    assert "kept  4/12" in done.err
    page, picture = (Path("tuned", name).read_text() for name in ("report.html", "loss.svg"))
    assert "retained loss" in page and 'class="retained"' in page and "data to retain" in page
    assert 'class="retained"' in picture and "retained loss" in picture
    assert "retained" not in Path("old/loss.svg").read_text().split("</style>")[1]


def test_resumed_runs_have_the_same_lines(place: Path) -> None:
    more = ("--val", "val.txt", "--retain-data", "old.txt", "--schedule", "constant", "--warmup", 0)
    train("whole", *more)
    train("half", *more, "--iters", 6)
    ran("from-scratch", "--resume", "half", "--iters", 12)
    same_bits(place / "whole" / "model.gguf", place / "half" / "model.gguf")
    assert dict(retained("whole"))[12] == dict(retained("half"))[12]
    assert [step for step, _ in retained("half")] == [4, 6, 8, 12]
    # it may be named anew, and taken away
    ran("from-scratch", "--resume", "half", "--iters", 14, "--retain-data", "val.txt")
    last = json.loads(ran("evaluate", "half/model.gguf", "val.txt", "--ctx", 32, "--json").out)
    assert retained("half")[-1] == (14, pytest.approx(last["loss"], rel=1e-6))


def test_a_validation_that_is_due_leaves_no_line(tmp_path: Path) -> None:
    """A run that ended within a validation is resumed before it; both of its lines are written again."""
    lines = [
        {"step": 2, "loss": 1.0},
        {"step": 2, "val_loss": 1.0},
        {"step": 2, "retain_loss": 1.0},
        {"step": 3},
    ]
    (tmp_path / "old.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for due, kept in ((False, lines[:3]), (True, lines[:1])):
        with Metrics(tmp_path / "new.jsonl", tmp_path / "old.jsonl", 2, due).open() as resumed:
            assert resumed.read() == kept


def test_from_python(place: Path) -> None:
    rows = [{"text": "What was known before must stay known. " * 3}] * 3
    shape = {"vocab_size": "bytes", "embd": 32, "head": 4, "layer": 1, "ff": 64, "ctx": 32}
    run = llamatrain.from_scratch("text.txt", **shape, iters=4, eval_every=2, retain_data=rows, out="run")  # type: ignore[arg-type]
    assert [step for step, _ in run.retained] == [2, 4] == [step for step, _ in retained("run")]
    assert run.retained[-1][1] == pytest.approx(retained("run")[-1][1])
    assert not run.validations and run.best is None


def test_what_is_refused(place: Path) -> None:
    refused(run("from-scratch", "text.txt", *SHAPE, "--retain-data", "none.txt", "--out", "a"), 2, "none.txt")
    (place / "empty.txt").write_text("")
    refused(
        run("from-scratch", "text.txt", *SHAPE, "--retain-data", "empty.txt", "--out", "a"), 1, "empty.txt"
    )
    (place / "broken.jsonl").write_text('{"prompt": 1}\n')
    refused(
        run("from-scratch", "text.txt", *SHAPE, "--retain-data", "broken.jsonl", "--out", "a"), 1, "broken"
    )
    assert not Path("a", "metrics.jsonl").exists()
    (place / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    train("base", "--iters", 1)
    more = ("--objective", "orpo", "--batch", 2, "--retain-data", "old.txt", "--out", "b")
    refused(run("finetune", "base/model.gguf", "pairs.jsonl", *more), 2, "--retain-data", "--objective")
    refused(run("evaluate", "m.gguf", "text.txt", "--retain-data", "old.txt"), 2, "m.gguf")
