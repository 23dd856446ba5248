"""What becomes of a run's folder while the run works: no step is lost for it."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain.adapters import gguf as adapters
from llamatrain.checkpoints.checkpoint import Checkpoint, write_model
from llamatrain.checkpoints.filenames import LATEST
from llamatrain.checkpoints.run_folder import RunFolder
from llamatrain.errors import FileError
from llamatrain.report import svg_plot
from llamatrain.report.metrics import Metrics
from llamatrain.report.series import Losses
from llamatrain.run.checkpointer import Checkpointer
from llamatrain.train.state import RunState
from tests.checkpoints.test_run_folder import at, names, newest_step, refused
from tests.helpers.adapter_files import adapter
from tests.helpers.cli import TINY, Argument, Done, environment, metrics, ran, run, text_file
from tests.helpers.emulator import SLOWNESS
from tests.helpers.lora_runs import base
from tests.helpers.small_models import small

PLAIN = (
    "--kernels",
    "reference",
    "--batch",
    2,
    "--ctx",
    32,
    "--seed",
    1,
    "--save-every",
    1,
    "--report-every",
    1,
)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return tmp_path


SCRATCH = ("from-scratch", "text.txt", *TINY, *PLAIN)


def trained(iters: int, words: tuple[Argument, ...] = SCRATCH, **at_steps: Callable[[], object]) -> Done:
    """A run in the folder `run`, and what is done before the saves of some steps: `_2=` before that of step 2."""
    before = Checkpointer.save

    def save(saver: Checkpointer, state: RunState, last: bool = False) -> str:
        at_steps.get(f"_{state.counters.step}", lambda: None)()
        return before(saver, state, last)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpointer, "save", save)
        return run(*words, "--iters", iters, "--out", "run")


def whole(folder: Path, iters: int, result: str = "model.gguf", drawn: bool = True) -> None:
    """Everything that such a run leaves."""
    assert {"config.toml", "metrics.jsonl", result, LATEST, f"checkpoint-{iters}.gguf"} <= set(names(folder))
    assert newest_step(folder) == iters and (folder / "loss.svg").exists() >= drawn
    assert [line["step"] for line in metrics(folder)] == [*range(1, iters + 1)]


def test_moved(place: Path) -> None:
    done = trained(4, _2=lambda: Path("run").rename("other"))
    assert done.code == 0 and done.err.count("was moved") == 1 and f"{place}/other/model.gguf" in done.err
    assert not Path("run").exists()
    whole(Path("other"), 4)
    ran("from-scratch", "--resume", "other", "--iters", 5)


def test_removed(place: Path) -> None:
    done = trained(4, _2=lambda: shutil.rmtree("run"))
    assert done.code == 0 and done.err.count("was removed; it was created again") == 1
    whole(Path("run"), 4)


def test_removed_before_the_last_save(place: Path) -> None:
    assert trained(3, _3=lambda: shutil.rmtree("run")).code == 0
    whole(Path("run"), 3)


def removed(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    """The folder, when a function is called for the first time."""
    before, left = getattr(owner, name), [1]

    def called(*values: Any) -> Any:
        if left:
            left.pop()
            shutil.rmtree("run")
        return before(*values)

    monkeypatch.setattr(owner, name, called)


@pytest.mark.parametrize(
    ("owner", "name"), [(Metrics, "open"), (svg_plot, "draw_svg"), (Losses, "from_lines")]
)
def test_removed_before_the_first_step_and_behind_the_last(
    owner: object, name: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed(monkeypatch, owner, name)
    done = run(*SCRATCH, "--iters", 2, "--out", "run")
    assert done.code == 0 and done.err.count("run was removed; it was created again") == 1, done.err
    whole(Path("run"), 2, drawn=name == "open")


def test_replaced_by_something_else(place: Path) -> None:
    def replaced() -> None:
        shutil.rmtree("run")
        Path("run").mkdir()
        Path("run/mine.txt").write_text("mine")

    done = trained(4, _2=replaced)
    assert (
        done.code == 0
        and "run is gone; the run continues in run-2" in done.err
        and names(Path("run")) == ["mine.txt"]
    )
    whole(Path("run-2"), 4)


def test_replaced_by_a_file_or_another_run(place: Path) -> None:
    def replaced() -> None:
        shutil.rmtree("run")
        Path("run").write_text("mine")

    assert trained(3, _2=replaced).code == 0 and Path("run").read_text() == "mine"
    whole(Path("run-2"), 3)


def test_moved_and_another_in_its_place(place: Path) -> None:
    def exchanged() -> None:
        Path("run").rename("first")
        with RunFolder.create(Path("run"), "finetune") as made:
            made.save(at(1), 1)

    done = trained(4, _2=exchanged)
    assert done.code == 0 and newest_step(Path("run")) == 1
    whole(Path("first"), 4)


def test_nowhere_else_but_the_temporary_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the disk that it lay on is gone."""
    real = Path.mkdir

    def gone(path: Path, *arguments: object, **more: object) -> None:
        if path.parent.resolve() == place:
            raise OSError(30, "Read-only file system")
        real(path, *arguments, **more)  # type: ignore[arg-type]

    def removed() -> None:
        shutil.rmtree("run")
        monkeypatch.setattr(Path, "mkdir", gone)

    done = trained(3, _2=removed)
    monkeypatch.undo()
    found = list((place / "tmp").iterdir())
    assert done.code == 0 and len(found) == 1 and str(found[0]) in done.err
    whole(found[0], 3)


# ---- figures ---------------------------------------------------------------


def test_figures_that_are_deleted_are_made_again(place: Path) -> None:
    done = trained(4, _2=lambda: Path("run/metrics.jsonl").unlink())
    assert done.code == 0 and done.err.count("metrics.jsonl was missing") == 1
    whole(Path("run"), 4)


def test_what_took_the_place_of_the_figures_is_kept(place: Path) -> None:
    def exchanged() -> None:
        Path("new").write_text("mine")
        Path("new").replace("run/metrics.jsonl")

    assert trained(3, _2=exchanged).code == 0
    whole(Path("run"), 3)
    assert Path("run/metrics.jsonl.passed-over").read_text() == "mine"


def test_figures_that_are_emptied_go_on(place: Path) -> None:
    assert trained(4, _2=lambda: os.truncate("run/metrics.jsonl", 0)).code == 0
    assert [line["step"] for line in metrics(Path("run"))][-2:] == [3, 4]


# ---- a disk that takes no more ---------------------------------------------


@contextmanager
def room(size: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


class Full:
    """What the disk below a folder says while this is on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
        self.on, real = False, os.fsync

        def check(file: int) -> None:
            place = Path(f"/proc/self/fd/{file}").resolve()
            if self.on and any(place.is_relative_to(each) for each in folders):
                raise OSError(28, "No space left on device")

        def fsync(file: int) -> None:
            check(file)
            real(file)

        class File(FileIO):
            """That of the figures; half of what finds no room is written."""

            def write(self, data: Any) -> int:
                with suppress(OSError):
                    check(self.fileno())
                    return super().write(data)
                if len(data) > 1:
                    return super().write(data[: len(data) // 2])
                raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr("llamatrain.report.metrics.FileIO", File)

    def set(self, on: bool) -> None:
        self.on = on


def test_a_save_that_fails_does_not_end_a_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Full(monkeypatch, place / "run")
    done = trained(5, _2=lambda: full.set(True), _4=lambda: full.set(False))
    assert done.code == 0, done.err
    for step in (2, 3):
        assert f"could not save at step {step}: run/" in done.err
    assert done.err.count("No space left on device; the next save will try again") == 2
    whole(Path("run"), 5)
    assert "checkpoint-4.gguf" in names(Path("run"))


def test_the_older_ones_stay_as_long_as_none_is_saved(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Full(monkeypatch, place / "run", place / "run-2")
    done = trained(4, _2=lambda: full.set(True))
    assert done.code == 1 and len(done.errors) == 1 and newest_step(Path("run")) == 1
    (found,) = (place / "tmp").iterdir()
    assert (
        f"No space left on device; the run is saved in {found} instead, continue with --resume {found}"
        in done.errors[0]
    )
    assert (
        newest_step(found) == 4
        and [line["step"] for line in metrics(found)] == [1, 2, 3, 4]
        and not Path("run-2").exists()
    )
    full.set(False)
    ran("from-scratch", "--resume", found, "--iters", 5)
    ran("from-scratch", "--resume", "run", "--iters", 5)
    assert Path("run/model.gguf").read_bytes() == (found / "model.gguf").read_bytes()


def test_where_nothing_can_be_saved_it_is_said_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Full(monkeypatch, place)
    done = trained(2, _2=lambda: full.set(True))
    assert done.code == 1 and len(done.errors) == 1 and "No space left" in done.errors[0]
    assert newest_step(Path("run")) == 1 and not list((place / "tmp").iterdir())


TUNE = ("finetune", "base.gguf", "text.txt", *PLAIN, "--precision", "f32", "--peft", "theirs")


@pytest.mark.parametrize("before", [True, False], ids=["a run", "the first lines"])
def test_a_full_disk_with_the_folder_for_peft_on_it(
    before: bool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is saved elsewhere; where it is gone on with in its own folder, its figures are there."""
    base(place / "base.gguf", small())
    full = Full(monkeypatch, *(place / name for name in ("run", "run-2", "theirs")))
    step = 3 if before else 1
    done = trained(3, TUNE, **{f"_{step}": lambda: full.set(True)})
    assert done.code == 1 and len(done.errors) == 1
    (found,) = (place / "tmp").iterdir()
    assert f"the run is saved in {found} instead, continue with --resume {found}" in done.errors[0]
    whole(found, 3, result="adapter.gguf", drawn=False)
    assert "was missing" not in done.err and not list(Path("run").glob("*.passed-over"))
    full.set(False)
    ran("finetune", "--resume", "run")
    assert [line["step"] for line in metrics(Path("run")) if "loss" in line] == [1, 2, 3]
    assert Path("run/adapter.gguf").read_bytes() == (found / "adapter.gguf").read_bytes()


def test_a_full_disk_below_the_folder_for_peft_alone(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base(place / "base.gguf", small())
    full = Full(monkeypatch, place / "theirs")
    done = trained(3, TUNE, _2=lambda: full.set(True))
    told = f"{place}/theirs/adapter_model.safetensors: cannot be written: No space left on device"
    assert done.code == 1 and len(done.errors) == 1 and "could not save" not in done.err
    assert f"warning: {told}; trying again at the next save" in done.err
    assert f"error: {told}" in done.err and f"--resume run --peft {place}/theirs" in done.err
    assert not Path("run-2").exists() and not list((place / "tmp").iterdir())
    whole(Path("run"), 3, result="adapter.gguf", drawn=False)
    full.set(False)
    before = Path("theirs/adapter_model.safetensors").read_bytes()
    ran("finetune", *done.errors[0].partition(" is saved, use ")[2].split()[:4])
    assert Path("theirs/adapter_model.safetensors").read_bytes() != before


def test_figures_wait_for_room(tmp_path: Path) -> None:
    with Metrics.create(tmp_path / "metrics.jsonl") as figures:
        with room(10):
            for step in range(5):
                figures.write({"step": step})
            with pytest.raises(FileError, match="File too large"):
                figures.flush()
        figures.flush()
    assert metrics(tmp_path) == [{"step": step} for step in range(5)]


# ---- seen to be readable ---------------------------------------------------


def unreadable(step: int) -> Checkpoint:
    checkpoint = at(step)
    name = next(iter(checkpoint.vectors))
    checkpoint.vectors[name] = np.full_like(checkpoint.vectors[name], np.inf)
    return checkpoint


def test_a_checkpoint_that_could_not_be_gone_on_from_replaces_none(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as made:
        made.save(at(1), 1)
        before = names(tmp_path)
        for step in (1, 2):
            told = refused(made.save, unreadable(step), 1)
            assert (
                f"checkpoint-{step}.gguf: not written, because it could not be read back: " in told
                and "not finite" in told
            )
            assert names(tmp_path) == before and newest_step(tmp_path) == 1


def test_the_result_is_opened_before_it_takes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = adapter(small(), ["blk.0.attn_q.weight"])
    write_model(tmp_path / "model.gguf", at(1).metadata, at(1).weights)
    adapters.write_adapter(tmp_path / "adapter.gguf", made)
    before = {name: (tmp_path / name).read_bytes() for name in ("model.gguf", "adapter.gguf")}
    monkeypatch.setattr("llamatrain.gguf.writer.MAGIC", b"none")
    for action in (
        lambda: write_model(tmp_path / "model.gguf", at(2).metadata, at(2).weights),
        lambda: adapters.write_adapter(tmp_path / "adapter.gguf", made),
    ):
        assert "not written, because it could not be read back: the header" in refused(action)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


# ---- killed before each thing that is done with files ----------------------

KILLED = """
import os, signal, sys
from llamatrain.cli.main import main
import llamatrain.run.train, llamatrain.data.dataset, llamatrain.run.choose_trainable, llamatrain.optim.methods.adamw
EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link"}
folder, moments, words = os.path.abspath(sys.argv[1]), sys.argv[2], sys.argv[3:]
def run(moment):
    left = moment
    def hook(event, arguments):
        nonlocal left
        if event in EVENTS and isinstance(arguments[0], (str, bytes, os.PathLike)):
            if os.path.abspath(os.fsdecode(arguments[0])).startswith(folder):
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    sys.argv = ["llamatrain", *words]
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    main()
moment = int(moments)
child = os.fork()
if not child:
    run(moment)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def killed(moment: int, *arguments: Argument) -> bool:
    """Before the operation of this number on the folder `run` or what is in it; False: there were not so many."""
    words = [sys.executable, "-c", KILLED, "run", str(moment), *map(str, arguments)]
    done = subprocess.run(
        words,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60 * SLOWNESS,
        check=True,
        cwd=Path.cwd(),
    )
    assert done.stdout.strip() in ("0", str(-signal.SIGKILL)), done
    return done.stdout.strip() != "0"


SHORT = ("from-scratch", "text.txt", *TINY, *PLAIN, "--iters", 1, "--out", "run")


def moments(count: int) -> list[object]:
    return [each if each % 48 == 17 else pytest.param(each, marks=pytest.mark.slow) for each in range(count)]


@pytest.mark.parametrize("moment", moments(48))
def test_killed_a_run_is_gone_on_with_or_begun_again(moment: int, place: Path) -> None:
    if killed(moment, *SHORT):
        resumed = run("from-scratch", "--resume", "run")
        if resumed.code:
            assert "no checkpoint to resume from" in resumed.err or "No such file" in resumed.err
            ran(*SHORT)
    whole(Path("run"), 1)
    assert not [name for name in names(Path("run")) if name.startswith(".")]


@pytest.mark.parametrize("moment", moments(72))
def test_killed_while_it_replaces_another(moment: int, place: Path) -> None:
    Path("run").mkdir()
    Path("run/mine.txt").write_text("mine")
    ran(*SHORT, "--seed", 2)
    before = json.dumps(metrics(Path("run")))
    killed(moment, *SHORT, "--overwrite")
    ran("from-scratch", "--resume", "run", "--iters", 2)
    seed = RunFolder.read_newest(Path("run"))[0].options["train"]["seed"]
    if seed == 2:
        assert json.dumps(metrics(Path("run"))[:1]) == before
    whole(Path("run"), 2)
    assert Path("run/mine.txt").read_text() == "mine" and not [
        name for name in names(Path("run")) if name.startswith(".")
    ]


@pytest.mark.parametrize("moment", moments(60))
def test_killed_while_it_goes_on(moment: int, place: Path) -> None:
    ran(*SHORT)
    killed(moment, "from-scratch", "--resume", "run", "--iters", 2)
    ran("from-scratch", "--resume", "run", "--iters", 3)
    whole(Path("run"), 3)
