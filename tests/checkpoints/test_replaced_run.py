"""A run that takes another's folder: the other is there again, unless the new one has saved something."""

from collections.abc import Callable
from pathlib import Path

import pytest

from llamatrain.checkpoints.filenames import LATEST
from llamatrain.checkpoints.run_folder import RunFolder
from tests.checkpoints.test_run_folder import at, names, newest_step, refused


class Killed(BaseException):
    """Before the call of this number to rename or to unlink: a process that is killed does nothing any more."""


def killed(monkeypatch: pytest.MonkeyPatch, number: int, action: Callable[[], object]) -> bool:
    """Whether it came to that."""
    left = number

    def mortal(name: str) -> Callable[..., object]:
        before = getattr(Path, name)

        def call(*arguments: object, **more: object) -> object:
            nonlocal left
            if (left := left - 1) < 0:
                raise Killed
            return before(*arguments, **more)

        return call

    with monkeypatch.context() as patch:
        for name in ("rename", "unlink", "rmdir"):
            patch.setattr(Path, name, mortal(name))
        try:
            action()
        except Killed:
            return True
    return False


def replaced(out: Path, saves: bool = False, discards: bool = False) -> None:
    run = RunFolder.create(out, "finetune", overwrite=True)
    try:
        run.replace_run()
        if saves or discards:  # the checkpoint is first
            run.save(at(1), 1)
            run.result_path("config.toml").write_text("new")
        if saves:
            run.remove_replaced()
        elif discards:
            run.undo()
    finally:
        run.close()


@pytest.mark.parametrize("ends", ["killed", "discarded", "saved"])
def test_a_run_is_replaced_by_one_that_has_saved_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """Wherever the new one is killed."""
    moment, died = 0, True
    while died:
        out = tmp_path / str(moment)
        with RunFolder.create(out, "finetune") as run:
            for step in (7, 8):
                run.save(at(step), 2)
            run.result_path("config.toml").write_text("old")
        (out / "mine.txt").touch()
        before = names(out)
        died = killed(
            monkeypatch, moment, lambda out=out: replaced(out, ends == "saved", ends == "discarded")
        )  # type: ignore[misc]
        newest = newest_step(out)
        config = (out / "config.toml").read_text() if (out / "config.toml").exists() else "none"
        with RunFolder(out):
            assert newest_step(out) == newest
        if newest == 8:
            assert names(out) == before and config == "old"
        else:
            there = [
                name for name in names(out) if name not in (LATEST, "config.toml")
            ]  # they come a moment after the first one
            assert (
                ends != "killed" and there == ["checkpoint-1.gguf", "mine.txt"] and config in ("new", "none")
            )
        moment += 1
    assert moment > 5 and newest == (1 if ends == "saved" else 8)


def test_recovery_that_is_killed_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for moment in range(9):
        out = tmp_path / str(moment)
        with RunFolder.create(out, "finetune") as run:
            run.save(at(7), 1)
            run.result_path("config.toml").write_text("old")
        before = names(out)
        replaced(out)
        killed(monkeypatch, moment, lambda out=out: RunFolder(out).close())  # type: ignore[misc]
        assert newest_step(out) == 7 and names(out) == before and (out / "config.toml").read_text() == "old"


def test_what_a_run_that_goes_on_has_put_aside_stays(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "finetune") as run:
        run.save(at(7), 1)
    with RunFolder.create(tmp_path, "finetune", overwrite=True) as run:
        run.replace_run()
        assert "no checkpoint to resume from" in refused(RunFolder.read_newest, tmp_path)
        run.save(at(1), 1)
        run.remove_replaced()
    assert newest_step(tmp_path) == 1


def test_a_folder_that_has_such_a_name(tmp_path: Path) -> None:
    (tmp_path / ".replaced-mine").mkdir()
    for name in ("adapter.gguf", ".replaced-mine/text"):
        (tmp_path / name).touch()
    RunFolder(tmp_path).close()
    assert (tmp_path / "adapter.gguf").exists() and (tmp_path / ".replaced-mine" / "text").exists()
