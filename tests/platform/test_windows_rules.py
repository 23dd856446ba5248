"""The package under the rules of Windows (tests/helpers/windows_rules.py), in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llamatrain.platform.cpu import CLASS_VARIABLE, CLASSES, processor
from llamatrain.platform.files import read_at, replace_held_file
from llamatrain.platform.processes import JobLimits, read_pipe
from tests.helpers.cli import ROOT, environment, ran, text_file
from tests.helpers.emulator import SLOWNESS, is_emulated

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the rules are made for Linux")
INSTALL = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from tests.helpers import windows_rules
windows_rules.install()
"""
# compiled kernels are those of this system
RUN = (
    INSTALL
    + """
from types import SimpleNamespace
from llamatrain.compiler import cache
cache.sys = SimpleNamespace(platform="linux")
sys.argv = ["llamatrain", *sys.argv[1:]]
from llamatrain.cli.main import main
try:
    main()
finally:
    print("system calls:", *sorted(set(windows_rules.calls)), file=sys.stderr)
"""
)
IMPORTS = (
    INSTALL
    + """
import importlib, pkgutil
import llamatrain
for each in pkgutil.walk_packages(llamatrain.__path__, "llamatrain."):
    if not {"__main__", "torch"} & {*each.name.split(".")}:  # torch need not be installed
        try:
            importlib.import_module(each.name)
        except ModuleNotFoundError as error:
            assert error.name == "mpi4py"  # which need not be installed either
"""
)
HELD = (
    INSTALL
    + """
from pathlib import Path
from llamatrain.errors import FileError
from llamatrain.checkpoints.run_folder import RunFolder
place = Path(sys.argv[1])
with RunFolder.create(place, "finetune") as run:
    try:
        RunFolder(place)
    except FileError as error:
        print(error)
print(sorted(file.name for file in place.iterdir()))
"""
)
CHATS = """{"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b."}]}\n"""
SHAPE = ("--vocab-size", "bytes", "--embd", 32, "--head", 4, "--layer", 1, "--ctx", 32, "--precision", "f32")


def said(source: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", source, str(ROOT), *map(str, arguments)]
    here = {CLASS_VARIABLE: processor().name} if processor().name in CLASSES else {}
    done = subprocess.run(
        words, env=environment(**here), capture_output=True, text=True, timeout=300 * SLOWNESS, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def test_every_module_is_imported() -> None:
    said(IMPORTS)


def test_one_run_at_a_time_and_nothing_stays(tmp_path: Path) -> None:
    told, left = said(HELD, tmp_path / "run").stdout.splitlines()
    assert told.startswith(f"{tmp_path / 'run'}: another run is using this folder") and left == "[]"


def test_a_run_is_resumed_and_gives_the_same_bits(tmp_path: Path) -> None:
    """A mapped checkpoint cannot be replaced: it is moved out of the way, and removed by the next command."""
    text = text_file(tmp_path, 3000)
    run = ("from-scratch", text, *SHAPE, "--save-every", 2)
    ran(*run, "--iters", 8, "--out", tmp_path / "whole")
    first = said(RUN, *run, "--iters", 8, "--max-time", "0.001s", "--out", tmp_path / "parts")
    assert "CreateFileW" in first.stderr and "GlobalMemoryStatusEx" in first.stderr
    for _ in range(9):
        if (tmp_path / "parts" / "model.gguf").exists():
            break
        said(RUN, "from-scratch", "--resume", tmp_path / "parts", "--max-time", "0.001s")
    said(RUN, "from-scratch", "--resume", tmp_path / "parts", "--max-time", "1h")
    models = [(tmp_path / name / "model.gguf").read_bytes() for name in ("whole", "parts")]
    assert models[0] == models[1]
    hidden = [file.name for file in (tmp_path / "parts").iterdir() if file.name.startswith(".")]
    assert len(hidden) <= 3  # of the last command, whose checkpoint was mapped to its end


@pytest.mark.skipif(is_emulated(), reason="a template may take one second, which an emulator needs to start")
def test_chats_with_a_template(tmp_path: Path) -> None:
    """The child that renders is in a job, and its pipe is looked into."""
    ran("from-scratch", text_file(tmp_path, 3000), *SHAPE, "--iters", 1, "--out", tmp_path / "base")
    chats = tmp_path / "chats.jsonl"
    chats.write_text(CHATS.replace("b.", os.urandom(8).hex()) * 40, newline="\r\n")  # not cached yet
    base = tmp_path / "base" / "model.gguf"
    options = ("--chat-template", "chatml", "--ctx", 128, "--batch", 2, "--iters", 2, "--lora-r", 2)
    done = said(RUN, "finetune", base, chats, *options, "--out", tmp_path / "tuned")
    for name in ("CreateJobObjectW", "SetInformationJobObject", "AssignProcessToJobObject", "PeekNamedPipe"):
        assert name in done.stderr
    merged = tmp_path / "merged.gguf"
    said(RUN, "export-lora", "-m", base, "--lora", tmp_path / "tuned" / "adapter.gguf", "-o", merged)
    assert merged.exists()
    told = said(RUN, "generate", merged, "--prompt", "a", "--ctx", 8, "--temp", 0).stdout
    assert told


# ---- single functions ----------------------------------------------------------


def test_a_file_that_is_held_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that scans new files holds them for a while."""
    new, target = tmp_path / "new", tmp_path / "target"
    new.write_text("new")
    target.write_text("old")
    tries = []
    replace = Path.replace

    def refuse_twice(self: Path, other: Path) -> Path:
        tries.append(self)
        if len(tries) < 3:
            raise PermissionError(13, "in use")
        return replace(self, other)

    monkeypatch.setattr(Path, "replace", refuse_twice)
    replace_held_file(new, target)
    assert target.read_text() == "new" and len(tries) == 3 and not new.exists()


def test_a_file_that_stays_held_is_moved_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llamatrain.platform import files

    new, target = tmp_path / "new", tmp_path / "target"
    new.write_text("new")
    target.write_text("old")

    def refuse(self: Path, other: Path) -> Path:
        raise PermissionError(13, "in use")

    monkeypatch.setattr(Path, "replace", refuse)
    monkeypatch.setattr(files, "REPLACE_SECONDS", 0.0)
    replace_held_file(new, target)
    assert target.read_text() == "new" and [file.name for file in tmp_path.iterdir()] == ["target"]


def test_if_the_new_file_cannot_be_moved_the_old_one_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llamatrain.platform import files

    target = tmp_path / "target"
    target.write_text("old")
    monkeypatch.setattr(files, "REPLACE_SECONDS", 0.0)
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(PermissionError(13, "in use")))
    with pytest.raises(FileNotFoundError):
        replace_held_file(tmp_path / "missing", target)
    assert target.read_text() == "old"


def test_reads_at_an_offset(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(range(100)))
    with file.open("rb") as stream:
        assert read_at(stream.fileno(), 5, 10) == bytes(range(10, 15))
        assert read_at(stream.fileno(), 5, 98) == b"bc" and stream.tell() == 0


def test_a_pipe_that_is_late() -> None:
    reader, writer = os.pipe()
    assert read_pipe(reader, 10, 0.01) is None
    os.write(writer, b"abc")
    assert read_pipe(reader, 10, 1) == b"abc"
    os.close(writer)
    assert read_pipe(reader, 10, 1) == b""
    os.close(reader)


def test_the_structure_of_a_job_has_its_size_on_windows() -> None:
    import ctypes

    assert ctypes.sizeof(JobLimits) == 144
