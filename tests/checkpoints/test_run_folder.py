"""The folder of a run: taken by one at a time, never without a checkpoint to go on from, and nobody else's files touched."""

import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from llamatrain.checkpoints.checkpoint import Checkpoint, write_checkpoint, write_model
from llamatrain.checkpoints.filenames import LATEST, checkpoints_newest_first, numbered_checkpoints
from llamatrain.checkpoints.read import read_checkpoint
from llamatrain.checkpoints.run_folder import RunFolder
from llamatrain.errors import FileError
from llamatrain.gguf.reader import open_gguf
from tests.helpers.emulator import SLOWNESS
from tests.helpers.tiny_checkpoint import tiny_checkpoint

ROOT = Path(__file__).resolve().parents[2]


def at(step: int) -> Checkpoint:
    return tiny_checkpoint(step=step)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def damage(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-100, 2)
        file.write(b"\xff")


def newest_step(place: Path) -> int:
    return RunFolder.read_newest(place)[0].state.counters.step


def refused(action: object, *arguments: object) -> str:
    with pytest.raises(FileError) as caught:
        action(*arguments)  # type: ignore[operator]
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- a folder for a new run ------------------------------------------------


def test_folders_are_numbered_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (RunFolder.create(None, "finetune") for _ in range(2))
    other = RunFolder.create(None, "from-scratch")
    assert [str(run.path) for run in (first, second, other)] == [
        "runs/finetune-1",
        "runs/finetune-2",
        "runs/from-scratch-1",
    ]
    (tmp_path / "runs" / "finetune-9").touch()
    (tmp_path / "runs" / "finetune-10-old").mkdir()
    with RunFolder.create(None, "finetune") as tenth:
        assert str(tenth.path) == "runs/finetune-10"
    for run in (first, second, other):
        run.close()


def test_a_number_that_another_run_takes_first_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "finetune-1").mkdir(parents=True)
    monkeypatch.setattr(Path, "iterdir", lambda _: iter(()))  # what was seen, a moment before
    with RunFolder.create(None, "finetune") as run:
        assert str(run.path) == "runs/finetune-2"


@pytest.mark.parametrize(
    "name", ["config.toml", "metrics.jsonl", "checkpoint-3.gguf", LATEST, "model.gguf", "adapter.gguf"]
)
def test_a_run_that_is_there_is_refused_or_removed(tmp_path: Path, name: str) -> None:
    out = tmp_path / "a" / "b"
    RunFolder.create(out, "finetune").close()
    foreign = ["checkpoint-03.gguf", "checkpoint-3.gguf.bak", "config.toml.old", "data.txt", "model.gguf.zip"]
    for other in foreign:
        (out / other).touch()
    RunFolder.create(out, "finetune").close()  # what others put there is no run
    (out / name).write_text("something")
    told = refused(RunFolder.create, out, "finetune")
    assert (
        name in told
        and "--overwrite" in told
        and (f"--resume {out}" in told) == name.startswith("checkpoint")
    )
    with RunFolder.create(out, "finetune", overwrite=True) as run:
        assert names(out) == sorted([*foreign, name])  # until the new one is sure to begin
        run.replace_run()
        assert [each for each in names(out) if not each.startswith(".")] == sorted(foreign)
        run.undo()  # it did not begin after all
        assert names(out) == sorted([*foreign, name])
        run.replace_run()
        run.remove_replaced()
        assert names(out) == sorted(foreign)


def test_a_folder_made_in_vain_is_taken_away(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name, stays in (("there", True), ("made", False), ("used", True)):
        with RunFolder.create(tmp_path / name, "finetune") as run:
            if name == "used":
                run.save(at(0), 1)
            run.undo()
        assert (tmp_path / name).exists() == stays


def test_what_a_killed_save_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    ours = [
        ".checkpoint-7.gguf.0123abcd.tmp",
        f".{LATEST}.00000000.tmp",
        ".model.gguf.ffffffff.tmp",
        ".metrics.jsonl.12345678.tmp",
    ]
    theirs = [
        ".data.txt.0123abcd.tmp",
        ".checkpoint-7.gguf.0123abc.tmp",
        "checkpoint-7.gguf.0123abcd.tmp",
        ".checkpoint-x.gguf.01234567.tmp",
    ]
    for name in ours + theirs:
        (tmp_path / name).touch()
    RunFolder(tmp_path).close()
    assert names(tmp_path) == sorted(theirs)


def test_one_run_at_a_time(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with RunFolder.create(out, "finetune") as run:
        assert "another run is using this folder" in refused(RunFolder, out)
        assert "another run is using this folder" in refused(RunFolder.create, out, "finetune", True)
        run.save(at(1), 1)
        assert newest_step(out) == 1  # reading is free
    RunFolder(out).close()
    refused(RunFolder.create, out, "finetune")
    RunFolder(out).close()  # one that was refused keeps nothing


HOLD = """
import sys, time
from pathlib import Path
from llamatrain.checkpoints.run_folder import RunFolder
with RunFolder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdout and process.stdout.readline()
        assert "another run" in refused(RunFolder, tmp_path)
        process.kill()
    RunFolder(tmp_path).close()


def test_places_that_cannot_be_folders(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "file: the folder cannot be created: File exists" in refused(
        RunFolder.create, tmp_path / "file", "finetune"
    )
    assert "Not a directory" in refused(RunFolder.create, tmp_path / "file" / "run", "finetune")
    assert "File name too long" in refused(RunFolder.create, tmp_path / ("x" * 300), "finetune")
    assert "No such file" in refused(RunFolder, tmp_path / "nowhere")


def test_a_result_has_one_of_the_known_names(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        assert run.result_path("model.gguf") == tmp_path / "model.gguf"
        with pytest.raises(ValueError, match=r"notes\.txt is none of config\.toml"):
            run.result_path("notes.txt")


# ---- saving ----------------------------------------------------------------


def test_the_last_ones_stay(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1.gguf.mine").touch()
    with RunFolder(tmp_path) as run:
        for step in range(5):
            assert run.save(at(step), 2) == tmp_path / f"checkpoint-{step}.gguf"
        assert names(tmp_path) == ["checkpoint-1.gguf.mine", "checkpoint-3.gguf", "checkpoint-4.gguf", LATEST]
        assert (tmp_path / LATEST).samefile(tmp_path / "checkpoint-4.gguf")
        run.save(at(10), 1)
        assert names(tmp_path) == ["checkpoint-1.gguf.mine", "checkpoint-10.gguf", LATEST]
    assert newest_step(tmp_path) == 10


def test_only_older_ones_are_removed(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        for step in (3, 1, 2):
            run.save(at(step), 1)
    assert names(tmp_path) == ["checkpoint-2.gguf", "checkpoint-3.gguf", LATEST]


def test_a_folder_in_the_place_of_latest(tmp_path: Path) -> None:
    (tmp_path / LATEST).mkdir()
    with RunFolder(tmp_path) as run:
        assert f"{LATEST}: this is a folder" in refused(run.save, at(1), 1)
    assert names(tmp_path) == ["checkpoint-1.gguf", LATEST]


def test_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        run.save(tiny_checkpoint(step=3, partial=True), 2)
        assert RunFolder.read_newest(tmp_path)[0].state.partial
        run.save(at(3), 2)
    for place in (tmp_path, tmp_path / LATEST, tmp_path / "checkpoint-3.gguf"):
        assert RunFolder.read_newest(place)[0].state.partial is None
    assert names(tmp_path) == ["checkpoint-3.gguf", LATEST]


def test_without_hard_links_latest_is_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", none)
    with RunFolder(tmp_path) as run:
        for step in (1, 2):
            run.save(at(step), 2)
    assert not (tmp_path / LATEST).samefile(tmp_path / "checkpoint-2.gguf")
    assert (tmp_path / LATEST).read_bytes() == (tmp_path / "checkpoint-2.gguf").read_bytes()
    assert names(tmp_path) == ["checkpoint-1.gguf", "checkpoint-2.gguf", LATEST]


def test_going_on_from_an_older_one_gives_up_what_came_after(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        for step in (1, 2, 3):
            run.save(at(step), 9)
        run.rewind(3)
        assert names(tmp_path) == [*(f"checkpoint-{step}.gguf" for step in (1, 2, 3)), LATEST]
        run.rewind(2)
        kept = [*(f"checkpoint-{step}.gguf" for step in (1, 2)), "checkpoint-3.gguf.passed-over", LATEST]
        assert names(tmp_path) == kept
        assert (tmp_path / LATEST).samefile(tmp_path / "checkpoint-2.gguf")
        (tmp_path / "checkpoint-2.gguf").unlink()
        run.rewind(2)
        assert newest_step(tmp_path / LATEST) == newest_step(tmp_path) == 2


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        run.save(at(1), 1)
        before = names(tmp_path)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            told = refused(run.save, at(2), 1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert told.startswith(f"{tmp_path}/checkpoint-2.gguf: cannot be written: File too large")
        assert names(tmp_path) == before and newest_step(tmp_path) == 1
        run.save(at(2), 1)
    assert newest_step(tmp_path) == 2


# ---- the newest that is sound ----------------------------------------------


def test_a_damaged_one_is_passed_over_and_it_is_said(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        for step in (8, 9, 10):
            run.save(at(step), 3)
    damage(tmp_path / LATEST)  # and with it the file that it is a name of
    checkpoint, path, notes = RunFolder.read_newest(tmp_path)
    assert (checkpoint.state.counters.step, path) == (9, tmp_path / "checkpoint-9.gguf")
    assert len(notes) == 1 and f"{tmp_path}/checkpoint-10.gguf" in notes[0] and "damaged" in notes[0]
    (tmp_path / "checkpoint-9.gguf").write_bytes(b"")
    assert newest_step(tmp_path) == 8
    damage(tmp_path / "checkpoint-8.gguf")
    told = refused(RunFolder.read_newest, tmp_path)
    assert re.match(
        f"{tmp_path}: no checkpoint to resume from; {tmp_path}/checkpoint-10.gguf: the file is damaged", told
    )


def test_a_file_is_taken_as_it_is_said(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        for step in (1, 2):
            run.save(at(step), 2)
    assert newest_step(tmp_path / "checkpoint-1.gguf") == 1
    damage(tmp_path / "checkpoint-2.gguf")
    assert refused(RunFolder.read_newest, tmp_path / "checkpoint-2.gguf").startswith(
        f"{tmp_path}/checkpoint-2.gguf: the file is"
    )
    assert "No such file" in refused(RunFolder.read_newest, tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    assert "no checkpoint to resume from" in refused(RunFolder.read_newest, tmp_path / "empty")
    assert "File name too long" in refused(RunFolder.read_newest, tmp_path / ("x" * 300))


def test_latest_counts_where_it_is_no_second_name(tmp_path: Path) -> None:
    """Copied folders have no links; a person may have kept LATEST alone."""
    for step in (1, 2):
        write_checkpoint(tmp_path / f"checkpoint-{step}.gguf", at(step))
    write_checkpoint(tmp_path / LATEST, at(3))
    assert [path.name for path in checkpoints_newest_first(tmp_path)] == [
        LATEST,
        "checkpoint-2.gguf",
        "checkpoint-1.gguf",
    ]
    write_checkpoint(tmp_path / LATEST, at(2))
    assert [path.name for path in checkpoints_newest_first(tmp_path)] == [
        "checkpoint-2.gguf",
        LATEST,
        "checkpoint-1.gguf",
    ]
    (tmp_path / LATEST).write_bytes(b"no GGUF")
    assert checkpoints_newest_first(tmp_path)[-1].name == LATEST
    assert newest_step(tmp_path) == 2
    write_checkpoint(tmp_path / LATEST, at(3))
    for file in numbered_checkpoints(tmp_path).values():
        file.unlink()
    assert newest_step(tmp_path) == 3


SAVE_ON = """
import sys
from pathlib import Path
from llamatrain.checkpoints.run_folder import RunFolder
from tests.helpers.tiny_checkpoint import tiny_checkpoint
place = Path(sys.argv[1])
with RunFolder(place) as run:
    step = RunFolder.read_newest(place)[0].state.counters.step if any(place.glob("checkpoint-*")) else 0
    made = [tiny_checkpoint(step=0, partial=partial) for partial in (True, False)]
    if not step:
        run.save(made[0], 2)
    print(step, flush=True)
    while True:
        step += 1
        for checkpoint in made:
            checkpoint.state.counters.step = step
            run.save(checkpoint, 2)
"""


def test_killed_at_any_moment_there_is_one_to_go_on_from(tmp_path: Path) -> None:
    chance, before, steps = random.Random(4), 0, list[int]()
    for _ in range(8):
        with subprocess.Popen(
            [sys.executable, "-c", SAVE_ON, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT
        ) as process:
            assert process.stdout
            assert int(process.stdout.readline()) == before
            time.sleep((0.03 + chance.random() * 0.1) * SLOWNESS)
            process.send_signal(signal.SIGKILL)
        checkpoint, _, notes = RunFolder.read_newest(tmp_path)
        assert not notes
        before = checkpoint.state.counters.step
        steps.append(before)
    assert steps == sorted(steps) and steps[-1] > 8
    RunFolder(tmp_path).close()
    assert (
        all(re.fullmatch(r"checkpoint-(\d+|LATEST)\.gguf", name) for name in names(tmp_path))
        and len(names(tmp_path)) <= 4
    )


# ---- the model -------------------------------------------------------------


def test_the_model_of_a_checkpoint(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as run:
        run.save(at(4), 1)
        checkpoint = RunFolder.read_newest(tmp_path)[0]
        write_model(run.result_path("model.gguf"), checkpoint.metadata, checkpoint.weights)
    gguf = open_gguf(tmp_path / "model.gguf")
    assert gguf.kind == "model" and gguf.metadata["general.file_type"] == 0
    assert list(gguf.tensors) == list(checkpoint.weights)
    for name, weight in read_checkpoint(tmp_path / LATEST).weights.items():
        np.testing.assert_array_equal(gguf.tensors[name].raw.view("<f4"), weight)
