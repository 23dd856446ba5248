"""Runs of several processes to which something happens: each ends in a line that says what, and goes on from its checkpoint with
the same bits."""

import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers import cli, lora_runs, mpi_programs
from tests.helpers.cli import PROGRAM, ROOT, TINY, Argument, Done, lines, losses, same_bits, text_file, until
from tests.helpers.mpi_programs import Started, needs_mpi, python
from tests.helpers.small_models import small

sys.path.insert(0, str(ROOT / "scripts"))
import hosts as made

sys.path.pop(0)

WHY_NOT = made.find_obstacle()
STEPS, SAVED = 100, 10
RUN = (*TINY, "--ctx", 32, "--threads", 1, "--iters", STEPS, "--save-every", SAVED)
pytestmark = needs_mpi


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With the run that nothing happens to."""
    folder, before = tmp_path_factory.mktemp("runs"), Path.cwd()
    os.chdir(folder)
    text_file(folder)
    cli.ran("from-scratch", "text.txt", *RUN, "--grad-groups", 8, "--out", "whole")
    yield folder
    os.chdir(before)


@contextmanager
def at_work(
    name: str, *more: Argument, options: tuple[str, ...] = ()
) -> Iterator[tuple[Started, dict[int, int]]]:
    """Some steps after a checkpoint, and the processes of its ranks."""
    words = (*PROGRAM[1:], "from-scratch", "text.txt", *RUN, "--out", name, *more)
    with mpi_programs.launched(2, *words, options=options) as process:
        until(lambda: lines(Path(name)) > SAVED + 5, process)
        assert process.poll() is None, process.communicate()
        yield process, mpi_programs.by_rank(process)


def goes_on(name: str, count: int) -> None:
    mpi_programs.ran(count, "from-scratch", "--resume", name)
    same_bits(Path(name) / "model.gguf", Path("whole/model.gguf"))
    assert losses(Path(name)) == losses(Path("whole"))


def test_a_signal_to_one_saves_for_all(place: Path) -> None:
    with at_work("asked") as (process, pids):
        os.kill(pids[1], signal.SIGTERM)
        done = mpi_programs.ended(process)
    assert lines(Path("asked")) < STEPS
    assert done.code == 143 and "interrupted; resume with: llamatrain from-scratch --resume asked" in done.err
    goes_on("asked", 1)


def test_one_that_is_killed(place: Path) -> None:
    with at_work("killed") as (process, pids):
        os.kill(pids[1], signal.SIGKILL)
        done = mpi_programs.ended(process, 5)
    assert done.code == 9 and not done.errors
    goes_on("killed", 2)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_one_that_stands_still(place: Path, rank: int) -> None:
    with at_work(f"still-{rank}", "--timeout", 2) as (process, pids):
        os.kill(pids[rank], signal.SIGSTOP)
        done = mpi_programs.ended(process, 20)
    assert done.code == 75 and len(done.errors) == 1
    named = f"error: no sign of rank {rank} ({os.uname().nodename}) for 2 s (last: "
    assert done.errors[0].startswith(named) and done.errors[0].endswith(
        f"; resume with: llamatrain from-scratch --resume still-{rank}"
    )
    goes_on(f"still-{rank}", 1)


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "they can be made")
@pytest.mark.parametrize("host", [1, 2])
def test_a_link_that_is_cut(place: Path, host: int) -> None:
    with made.create_hosts(2) as two:
        with at_work(f"cut-{host}", "--timeout", 2, options=tuple(two.options)) as (process, _):
            two.cut(host)
            done = mpi_programs.ended(process, 20)
        end = time.monotonic() + 5
        while two.processes():
            assert time.monotonic() < end
            time.sleep(0.05)
    assert done.code == 75 and "no sign of rank" in done.err and f"--resume cut-{host}" in done.err
    goes_on(f"cut-{host}", 2)


def test_a_disk_that_is_full_for_the_first_alone(place: Path) -> None:
    """All end with the words of the one that writes."""
    with at_work("full") as (process, pids):
        resource.prlimit(
            pids[0], resource.RLIMIT_FSIZE, (100_000, resource.prlimit(pids[0], resource.RLIMIT_FSIZE)[1])
        )
        done = mpi_programs.ended(process, 60)
    assert done.code == 1 and len(done.errors) == 1 and "File too large" in done.errors[0], done.err
    assert "Traceback" not in done.err and "rank 1" not in done.errors[0]
    assert not [path.name for path in Path("full").iterdir() if path.name.startswith(".")]
    goes_on("full", 2)


# ---- what differs --------------------------------------------------------------

APART = """
import ctypes, os, subprocess
if os.environ["PMI_RANK"] == "1":
    assert ctypes.CDLL(None).unshare(0x20000) == 0  # its own mounts
    for words in (["--make-rprivate", "/"], ["--bind", "there", "here"]):
        subprocess.run(["mount", *words], check=True)
os.chdir("here")
from llamatrain.__main__ import main
main()
"""


def apart(folder: Path, other: Callable[[Path], object], *words: Argument) -> Done:
    """On two hosts that each have their own files under the same names, of which one is another."""
    for name in ("here", "there"):
        (folder / name).mkdir()
        text_file(folder / name)
        lora_runs.base(folder / name / "base.gguf", small())
    other(folder / "there")
    return mpi_programs.python(2, "-c", APART, *words, "--out", folder / "run", cwd=folder)


def another_base(folder: Path) -> None:
    lora_runs.base(folder / "base.gguf", small(), arrays=lora_runs.new_weights(small(), 2))


def another_byte(folder: Path) -> None:
    content = bytearray((folder / "base.gguf").read_bytes())
    content[-100] ^= 1
    (folder / "base.gguf").write_bytes(content)


def another_text(folder: Path) -> None:
    text_file(folder, seed=2)


def no_text(folder: Path) -> None:
    (folder / "text.txt").unlink()


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="mounts take root")
@pytest.mark.parametrize(
    ("other", "told", "code"),
    [
        (another_base, "its base is ", 1),
        (another_byte, "its base is ", 1),
        (another_text, "its data is ", 1),
        (no_text, "text.txt: ", 2),
    ],
)
def test_what_differs_on_one_host_is_named(
    other: Callable[[Path], object], told: str, code: int, tmp_path: Path
) -> None:
    words = (
        "finetune",
        "base.gguf",
        "text.txt",
        "--iters",
        2,
        "--threads",
        1,
        "--ctx",
        16,
        "--precision",
        "f32",
    )
    done = apart(tmp_path, other, *words)
    assert done.code == code and len(done.errors) == 1, done
    assert f"rank 1 ({os.uname().nodename})" in done.errors[0] and told in done.errors[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("what", ["from-scratch", "evaluate"])
def test_ranks_of_other_sources_do_not_run_together(what: str, tmp_path: Path) -> None:
    """Though they call themselves the same version: one machine may have been updated, and another not."""
    shutil.copytree(
        ROOT / "llamatrain", tmp_path / "other" / "llamatrain", ignore=shutil.ignore_patterns("__pycache__")
    )
    with (tmp_path / "other" / "llamatrain" / "optim" / "schedule.py").open("a") as file:
        file.write("# changed\n")
    program = (
        "import os, sys\n"
        f"sys.path.insert(0, {str(tmp_path / 'other')!r} if os.environ.get('PMI_RANK') == '1' else {str(ROOT)!r})\n"
        "from llamatrain.__main__ import main\nmain()\n"
    )
    (tmp_path / "program.py").write_text(program)
    text = text_file(tmp_path, 3000)
    words = (
        ("from-scratch", text, *TINY, "--iters", 1)
        if what == "from-scratch"
        else ("evaluate", "none.gguf", text)
    )
    done = python(2, tmp_path / "program.py", *words, cwd=tmp_path, env={"PYTHONPATH": ""})
    assert done.code == 1 and "differs from rank 0" in done.err, done.err
    assert len(done.errors) == 1 and not list(tmp_path.glob("runs/*"))
