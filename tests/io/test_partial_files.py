"""What a killed writer leaves beside a place goes with the next one for that place, and nothing else does."""

import os
import signal
from pathlib import Path

import pytest

from llamatrain.adapters import peft
from llamatrain.io.atomic_write import AtomicFile
from llamatrain.io.partial_files import create_partial, partial_prefix
from llamatrain.platform.temp_files import remove_all
from tests.commands.test_export_process import large
from tests.helpers.cli import finished, ran, started, text_file, until
from tests.helpers.lora_runs import base
from tests.helpers.small_models import small


def temporaries(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir() if file.name.endswith(".tmp")}


def write(path: Path) -> None:
    with AtomicFile(path) as file:
        file.write(b"new")


def left_for(place: Path) -> Path:
    """As a process that is gone leaves it: held by nobody."""
    left = place.with_name(f"{partial_prefix(place)}0123abcd.tmp")
    left.write_bytes(b"half")
    return left


@pytest.mark.parametrize("name", ["m.gguf", "m[1]*?.gguf", "x" * 80 + ".gguf"])
def test_what_is_left_goes(name: str, tmp_path: Path) -> None:
    left = left_for(tmp_path / name)
    write(tmp_path / name)
    assert not left.exists() and [each.name for each in tmp_path.iterdir()] == [name]


def test_a_signal_right_after_the_file_is_created_removes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list[str]()
    create = Path.open

    def create_and_get_signal(path: Path, mode: str) -> object:
        create(path, mode).close()
        remove_all()  # what the handler of a signal does
        left.extend(temporaries(tmp_path))
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "open", create_and_get_signal)
    with pytest.raises(KeyboardInterrupt):
        create_partial(tmp_path / "m.gguf")
    assert not left and not temporaries(tmp_path)


def test_what_another_writes_stays(tmp_path: Path) -> None:
    with AtomicFile(tmp_path / "m.gguf") as first:
        first.write(b"first")
        write(tmp_path / "m.gguf")
        assert len(temporaries(tmp_path)) == 1
    assert (tmp_path / "m.gguf").read_bytes() == b"first"


def test_what_is_no_such_file_stays(tmp_path: Path) -> None:
    strange = [
        ".m.gguf.0123abcd.tmp.gguf",
        ".m.gguf.tmp",
        ".m.gguf.0123ABCD.tmp",
        ".mm.gguf.0123abcd.tmp",
        "m.gguf.0123abcd.tmp",
    ]
    for name in strange:
        (tmp_path / name).write_text("mine")
    (tmp_path / ".m.gguf.00000000.tmp").mkdir()
    (tmp_path / ".m.gguf.00000001.tmp").symlink_to(tmp_path / strange[0])
    os.mkfifo(tmp_path / ".m.gguf.00000002.tmp")
    there = {file.name for file in tmp_path.iterdir()}
    write(tmp_path / "m.gguf")
    assert {file.name for file in tmp_path.iterdir()} == {*there, "m.gguf"}
    assert (tmp_path / strange[0]).read_text() == "mine"


def test_long_names_that_begin_alike_are_told_apart(tmp_path: Path) -> None:
    left = left_for(tmp_path / ("x" * 60 + "1.gguf"))
    write(tmp_path / ("x" * 60 + "2.gguf"))
    assert left.exists()


@pytest.mark.skipif(os.name == "nt", reason="signals are others there")
def test_the_export_after_a_killed_one(tmp_path: Path) -> None:
    base, lora = large(tmp_path)
    arguments = ("export-lora", base, "--lora", lora, "--out", tmp_path / "m.gguf")
    with started(*arguments, "--type", "q3_k") as process:
        until(lambda: bool(temporaries(tmp_path)), process)
        process.send_signal(signal.SIGKILL)
        finished(process)
    assert len(temporaries(tmp_path)) == 1
    write(tmp_path / "m.gguf")
    assert not temporaries(tmp_path)


@pytest.mark.parametrize("out", ["theirs", "run/theirs"])
def test_what_a_killed_run_began_for_peft_goes_with_the_one_that_goes_on(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text_file(tmp_path)
    small_run = ("--batch", 2, "--ctx", 32, "--iters", 1, "--precision", "f32", "--kernels", "reference")
    ran("finetune", base(tmp_path / "m.gguf", small()), "text.txt", *small_run, "--peft", out, "--out", "run")
    for name in (peft.CONFIG, peft.WEIGHTS):
        left_for(Path(out) / name)
    (Path(out) / f"{partial_prefix(Path('mine'))}0123abcd.tmp").write_text("mine")
    with AtomicFile(Path(out) / peft.CONFIG) as file:  # of another run that works now
        left_for(Path(out) / peft.CONFIG)
        file.write(b"{}")
        ran("finetune", "--resume", "run")
        assert len(temporaries(Path(out))) == 2
    assert temporaries(Path(out)) == {".mine.0123abcd.tmp"}
