"""What was made at the lowest validation loss is kept, and a run may end where none lower comes: exactly, whatever happens."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llamatrain.checkpoints import run_folder as folders
from llamatrain.checkpoints.read import read_checkpoint
from llamatrain.io.atomic_write import AtomicFile
from llamatrain.report.series import Losses
from llamatrain.report.svg_plot import draw_svg
from llamatrain.train.evaluate import LossMeter
from llamatrain.train.state import BestValidation
from llamatrain.train.step import StepRunner
from tests.helpers.cli import TINY, Argument, metrics, ran, run, same_bits, steps, text_file, timeless
from tests.helpers.lora_runs import base
from tests.helpers.small_models import small

RATE = (
    "--lr",
    1,
    "--schedule",
    "constant",
    "--warmup",
    0,
    "--seed",
    3,
    "--batch",
    2,
    "--ctx",
    32,
    "--precision",
    "f32",
)


@pytest.fixture
def tuned(tmp_path: Path) -> Callable[..., Any]:
    """An adapter that is trained at much too high a rate: its validation falls, and rises."""
    model, data = base(tmp_path / "base.gguf", small(layers=1)), text_file(tmp_path, 1000)

    def tune(name: str, *more: Argument) -> Any:
        lora = ("--lora-r", 2, "--lora-alpha", 2)
        words = ("finetune", model, data, *RATE, *lora, "--val-split", 0.2, "--out", tmp_path / name)
        return run(*words, *more)

    return tune


def validations(folder: Path) -> list[dict[str, Any]]:
    return [line for line in metrics(folder) if "val_loss" in line]


def best_of(folder: Path) -> int:
    """The step of the lowest loss, as its figures have it."""
    return min(validations(folder), key=lambda line: line["val_loss"])["step"]


def bests(folder: Path) -> set[int]:
    """Of those that are kept."""
    return {int(file.stem.removeprefix("best-")) for file in folder.glob("best-*.gguf")}


@pytest.mark.parametrize(
    "more", [(), ("--keep", 1, "--keep-results", 1, "--adapter-type", "f16")], ids=["plain", "others"]
)
def test_it_is_the_result_of_that_step(
    more: tuple[Argument, ...], tuned: Callable[..., Any], tmp_path: Path
) -> None:
    """Where no save is due, too."""
    done = tuned("run", "--iters", 18, "--eval-every", 2, "--save-every", 7, *more)
    found, folder = validations(tmp_path / "run"), tmp_path / "run"
    step = best_of(folder)
    assert done.code == 0 and 0 < step < 18 and step % 7, [line["val_loss"] for line in found]
    lowest = math.inf
    for line in found:
        assert line.get("best", False) == (line["val_loss"] < lowest)
        lowest = min(lowest, line["val_loss"])
    assert tuned("part", "--iters", step, "--eval-every", 0, *more).code == 0
    assert (folder / "best.gguf").read_bytes() == (tmp_path / "part" / "adapter.gguf").read_bytes()
    assert step in bests(folder) and len(bests(folder)) <= 3
    line = next(line for line in done.err.splitlines() if line.startswith("best validation: "))
    assert f"step {step}: {folder / 'best.gguf'}" in line and f"--lora {folder / 'best.gguf'}" in line
    assert f"at step {step})" in (folder / "loss.svg").read_text()


def test_a_model_s_best_runs(tmp_path: Path) -> None:
    ran(
        "from-scratch",
        text_file(tmp_path),
        *TINY,
        *RATE,
        "--iters",
        6,
        "--eval-every",
        2,
        "--val-split",
        0.1,
        "--out",
        tmp_path / "a",
    )
    step = best_of(tmp_path / "a")
    ran(
        "from-scratch",
        tmp_path / "text.txt",
        *TINY,
        *RATE,
        "--iters",
        step,
        "--val-split",
        0.1,
        "--out",
        tmp_path / "b",
    )
    same_bits(tmp_path / "a" / "best.gguf", tmp_path / "b" / "model.gguf")
    ran("generate", tmp_path / "a" / "best.gguf", "-n", 2)


def test_the_last_may_be_the_best(tuned: Callable[..., Any], tmp_path: Path) -> None:
    done = tuned("run", "--lr", 0.001, "--iters", 3)
    assert best_of(tmp_path / "run") == 3
    assert "at step 3, the last" in done.err
    assert (tmp_path / "run" / "best.gguf").samefile(tmp_path / "run" / "adapter.gguf")


# ---- patience --------------------------------------------------------------


def test_it_ends_where_none_better_came(tuned: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert tuned("whole", "--iters", 24, "--eval-every", 2).code == 0
    done = tuned("run", "--iters", 24, "--eval-every", 2, "--patience", 3)
    losses = [line["val_loss"] for line in validations(tmp_path / "whole")]
    end = next(n for n in range(3, len(losses)) if min(losses[: n - 2]) <= min(losses[n - 2 : n + 1]))
    assert len(steps(folder)) == 2 * end < 24
    assert re.search(
        rf"stopped: no validation loss below \S+ \(step {best_of(folder)}\) in the last 3 validations",
        done.err,
    )
    ran("finetune", "--resume", folder)
    assert len(steps(folder)) == 2 * end, "it stays ended"
    ran("finetune", "--resume", folder, "--patience", 30)
    assert timeless(folder) == timeless(tmp_path / "whole")
    assert (folder / "best.gguf").read_bytes() == (tmp_path / "whole" / "best.gguf").read_bytes()


def test_it_is_counted_across_resumes(tuned: Callable[..., Any], tmp_path: Path) -> None:
    given = ("--eval-every", 2, "--patience", 3)
    assert tuned("whole", "--iters", 24, *given).code == 0
    ended = len(steps(tmp_path / "whole"))
    assert tuned("parts", "--iters", ended - 4, *given).code == 0
    ran("finetune", "--resume", tmp_path / "parts", "--iters", 24)
    assert timeless(tmp_path / "parts")[-4:] == timeless(tmp_path / "whole")[-4:]
    same_bits(tmp_path / "parts" / "best.gguf", tmp_path / "whole" / "best.gguf")


@pytest.mark.parametrize(
    ("given", "why"),
    [(("--val-split", 0), "--val or --val-split"), (("--eval-every", 0), "--eval-every 0")],
)
def test_without_validations_it_means_nothing(
    given: tuple[Argument, ...], why: str, tuned: Callable[..., Any]
) -> None:
    done = tuned("run", "--iters", 2, "--patience", 3, *given)
    assert done.code == 2 and len(done.errors) == 1
    assert done.errors[0].startswith("error: --patience has no effect ") and why in done.errors[0]
    assert done.errors[0].endswith(" [unused-option]")


def test_what_is_no_number_is_no_better() -> None:
    best = BestValidation()
    assert [
        best.observe(loss, step) for step, loss in enumerate([math.nan, 3.0, math.nan, 3.0, math.inf])
    ] == [
        False,
        True,
        False,
        False,
        False,
    ]
    assert (best.step, best.stale) == (1, 3)
    assert best.stop_reason(4) is None and best.stop_reason(0) is None
    assert best.stop_reason(3) == "no validation loss below 3 (step 1) in the last 3 validations"
    assert "that is a number" in (BestValidation(stale=2).stop_reason(2) or "")


# ---- out of time -----------------------------------------------------------


def out_of_time_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the time be up after so many steps of a process."""
    taken = iter(range(1, 10**6))
    monkeypatch.setattr(StepRunner, "out_of_time", lambda stepping: next(taken) >= steps)


@pytest.mark.parametrize("ended", [3, 4])
def test_the_last_step_is_validated_where_the_time_is_up(
    ended: int, tuned: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, also where its validation was due anyway."""
    with monkeypatch.context() as patched:
        out_of_time_after(ended, patched)
        done = tuned("run", "--lr", 0.001, "--iters", 9, "--eval-every", 4)
    folder = tmp_path / "run"
    assert done.code == 0 and "the time is up" in done.err
    assert [line["step"] for line in validations(folder)] == [0, ended]
    assert best_of(folder) == ended and f"at step {ended}, the last" in done.err
    assert (folder / "best.gguf").samefile(folder / "adapter.gguf")


def test_nothing_is_validated_at_the_end_where_nothing_ever_is(
    tuned: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out_of_time_after(3, monkeypatch)
    assert tuned("run", "--iters", 9, "--eval-every", 0).code == 0
    assert not validations(tmp_path / "run")


@pytest.mark.parametrize("slices", [1, 3, 5])
def test_patience_does_not_depend_on_when_the_time_was_up(
    slices: int, tuned: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, folder = ("--iters", 24, "--eval-every", 2, "--patience", 3), tmp_path / "run"
    done = tuned("whole", *given)
    assert "stopped: no validation loss below" in done.err
    with monkeypatch.context() as patched:
        out_of_time_after(slices, patched)
        done = tuned("run", *given)
    while "the time is up" in done.err:
        with monkeypatch.context() as patched:
            out_of_time_after(slices, patched)
            done = ran("finetune", "--resume", folder)
    assert "stopped: no validation loss below" in done.err
    found, whole = (
        [line | {"best": False} for line in timeless(tmp_path / name)] for name in ("run", "whole")
    )
    assert [line for line in found if "loss" in line or line["step"] % 2 == 0] == whole
    assert len(found) > len(whole)


# ---- kills -----------------------------------------------------------------


class Killed(SystemExit):
    """As a process that is gone: nobody handles it."""


def killed_at(monkeypatch: pytest.MonkeyPatch, moment: str, step: int) -> None:
    """Before a checkpoint of this step is written, or after it; or after the best is."""
    write, link_best = folders.write_checkpoint, folders.RunFolder.link_best

    def written(path: Path, checkpoint: Any, *more: Any, **others: Any) -> None:
        here = checkpoint.state.counters.step == step
        if here and moment == "before":
            raise Killed(9)
        write(path, checkpoint, *more, **others)
        if here and moment == "after":
            raise Killed(9)

    def kept(folder: Any, at: int, source: Path) -> bool:
        linked = link_best(folder, at, source)
        if at == step and moment == "best":
            raise Killed(9)
        return linked

    monkeypatch.setattr(folders, "write_checkpoint", written)
    monkeypatch.setattr(folders.RunFolder, "link_best", kept)


@pytest.mark.parametrize("moment", ["before", "after", "best"])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_a_kill_heals(
    moment: str, every: int, tuned: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the step of the best validation, or at the save after it: between best.gguf and the checkpoint that knows of it."""
    given = ("--iters", 14, "--eval-every", 2, "--save-every", every, "--keep", 1)
    assert tuned("whole", *given).code == 0
    step = best_of(tmp_path / "whole")
    known = [line["step"] for line in validations(tmp_path / "whole") if line.get("best")]
    assert len(known) > 2
    with monkeypatch.context() as patched:
        killed_at(patched, moment, step if moment == "best" else -(-step // every) * every)
        assert tuned("run", *given).code == 9
    folder = tmp_path / "run"
    before = read_checkpoint(folder / "checkpoint-LATEST.gguf").state
    if before.best.step is not None and moment != "after":  # left before it comes to that validation again
        ran("finetune", "--resume", folder, "--max-time", "0.001s") if before.counters.step < 12 else None
        now = read_checkpoint(folder / "checkpoint-LATEST.gguf").state
        assert (folder / "best.gguf").samefile(folder / f"best-{now.best.step}.gguf")
    ran("finetune", "--resume", folder)
    found = timeless(folder)
    assert [line for line in found if "loss" in line or not line["step"] % 2] == timeless(tmp_path / "whole")
    assert [line["step"] for line in found if "val_loss" in line and line.get("best")][-1] == step
    assert (folder / "best.gguf").read_bytes() == (tmp_path / "whole" / "best.gguf").read_bytes()


def test_a_validation_that_was_cut_short_counts_once(
    tuned: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, counted = ("--iters", 24, "--eval-every", 2, "--patience", 3), 0
    add = LossMeter.add

    def cut(scoring: LossMeter, *more: Any) -> None:
        nonlocal counted
        add(scoring, *more)
        counted += 1
        if counted in (10, 17):
            raise KeyboardInterrupt

    assert tuned("whole", *given).code == 0
    with monkeypatch.context() as patched:
        patched.setattr(LossMeter, "add", cut)
        tuned("run", *given)
        run("finetune", "--resume", tmp_path / "run")
    ran("finetune", "--resume", tmp_path / "run")
    assert timeless(tmp_path / "run") == timeless(tmp_path / "whole")


def test_the_base_s_own_validation_is_counted_though_it_was_told(
    tuned: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the first validation and the next save: the checkpoint knows nothing of it."""
    given = ("--iters", 4, "--eval-every", 2, "--save-every", 4)
    assert tuned("whole", *given).code == 0 and validations(tmp_path / "whole")[0]["best"]
    with monkeypatch.context() as patched:
        killed_at(patched, "before", 4)
        assert tuned("run", *given).code == 9
    ran("finetune", "--resume", tmp_path / "run")
    assert timeless(tmp_path / "run") == timeless(tmp_path / "whole")
    same_bits(tmp_path / "run" / "best.gguf", tmp_path / "whole" / "best.gguf")


# ---- disks, folders, files -------------------------------------------------


def test_a_full_disk_is_said_and_the_run_goes_on(
    tuned: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: AtomicFile) -> None:
        if file.path.name.startswith("best-"):
            raise OSError(28, "No space left on device")
        keep(file)

    keep = AtomicFile._publish
    monkeypatch.setattr(AtomicFile, "_publish", full)
    done = tuned("run", "--iters", 18, "--eval-every", 2, "--save-every", 0)
    assert done.code == 0 and len(steps(tmp_path / "run")) == 18
    assert done.err.count("No space left on device; best.gguf is not updated at step") >= 1
    assert ", which has no file" in done.err
    assert not (tmp_path / "run" / "best.gguf").exists()


def test_another_folder_has_it_too(tuned: Callable[..., Any], tmp_path: Path) -> None:
    assert tuned("run", "--iters", 12, "--eval-every", 2, "--save-every", 4, "--keep", 9).code == 0
    step = best_of(tmp_path / "run")
    later = min(
        int(file.stem.split("-")[1])
        for file in (tmp_path / "run").glob("checkpoint-?*.gguf")
        if file.stem[11:].isdigit() and int(file.stem[11:]) > step
    )
    alone = tmp_path / "alone"
    alone.mkdir()
    for place in (tmp_path / "run", alone):
        source = place / f"checkpoint-{later}.gguf"
        if place == alone:
            source.write_bytes((tmp_path / "run" / source.name).read_bytes())
        done = ran("finetune", "--resume", source, "--out", tmp_path / f"from-{place.name}")
        lost = f"best-{step}.gguf, the best result so far, is missing" in done.err
        assert lost == (place == alone)
    assert (tmp_path / "from-run" / "best.gguf").read_bytes() == (tmp_path / "run" / "best.gguf").read_bytes()
    assert not (tmp_path / "from-alone" / "best.gguf").exists()


def test_of_other_validation_data_it_begins_anew(tuned: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "val.txt").write_text("something new " * 90)
    assert (
        tuned("run", "--iters", 6, "--eval-every", 2, "--val-split", 0, "--val", tmp_path / "val.txt").code
        == 0
    )
    (tmp_path / "other.txt").write_text("something else " * 90)
    done = ran("finetune", "--resume", tmp_path / "run", "--iters", 8, "--val", tmp_path / "other.txt")
    assert "the validation data has changed: the best validation is determined anew" in done.err
    assert read_checkpoint(tmp_path / "run" / "checkpoint-8.gguf").state.best.step == 8


def test_a_checkpoint_without_it_goes_on(tuned: Callable[..., Any], tmp_path: Path) -> None:
    """Those of before knew of no best: the next validation is."""
    assert tuned("run", "--iters", 4, "--eval-every", 0).code == 0
    assert read_checkpoint(tmp_path / "run" / "checkpoint-4.gguf").state.best == BestValidation()
    ran("finetune", "--resume", tmp_path / "run", "--iters", 6, "--eval-every", 2)
    assert read_checkpoint(tmp_path / "run" / "checkpoint-6.gguf").state.best.step == 6


def test_the_picture_marks_it() -> None:
    lines = [{"step": step, "val_loss": loss} for step, loss in enumerate([3.0, 2.5, 2.5, None, 4.0])]
    losses = Losses.from_lines([*lines, {"step": 1, "loss": 3.0}])
    assert losses.best.steps.tolist() == [1.0] and losses.best.values.tolist() == [2.5]
    drawn = draw_svg(losses, "run")
    assert drawn.count("validation best") == 1 and "validation loss 4.0000 (best 2.5000 at step 1)" in drawn
    assert "validation best" not in draw_svg(Losses.from_lines([{"step": 1, "loss": 3.0}]), "run")
