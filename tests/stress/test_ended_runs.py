"""What a run leaves that was ended from outside: no process, and no file that was begun."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.cli import TINY, environment, finished, started, text, text_file, until
from tests.helpers.lora_runs import base
from tests.helpers.small_models import small
from tests.helpers.warm_cache import warm

SMALL = (*TINY, "--layer", 1, "--ctx", 16, "--batch", 2, "--precision", "f32", "--iters", 2)
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of one's own with model.gguf and text.txt in it."""
    monkeypatch.chdir(tmp_path)
    base(tmp_path / "model.gguf", small())
    text_file(tmp_path, 2000)
    return tmp_path


def holders(word: str) -> list[int]:
    """The processes, but this one, that have it in their environment or among their arguments."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (
                int(process.name) == os.getpid()
                or (process / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            ):
                continue
            if word.encode() in (process / "environ").read_bytes() + (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found


def in_seconds(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


RARE = (signal.SIGINT, signal.SIGHUP, signal.SIGKILL)
ENDINGS = [signal.SIGTERM, *(pytest.param(each, marks=pytest.mark.slow) for each in RARE)]


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
@pytest.mark.parametrize("cache", ["folder", "none"])
def test_nobody_compiles_on_for_a_run_that_was_ended(how: signal.Signals, cache: str, place: Path) -> None:
    """Nor is anything left where the tokens were kept for the run alone, after the next one if not before."""
    (place / "temporary").mkdir()
    (place / "cache").mkdir() if cache == "folder" else (place / "cache").write_text("no folder")
    env = environment(LLAMATRAIN_CACHE=str(place / "cache"), TMPDIR=str(place / "temporary"))
    with started("from-scratch", "text.txt", *SMALL, "--out", "run", env=env) as process:
        until(lambda: len(holders(str(place))) > 2, process)
        process.send_signal(how)
        done = finished(process)
    assert (
        done.code == {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGHUP: 129, signal.SIGKILL: -9}[how]
    ), done.err
    assert in_seconds(lambda: not holders(str(place)), 60)
    if how == signal.SIGKILL:
        sweeping = "from llamatrain.platform import temp_files; temp_files.create_temp_folder()"
        subprocess.run([sys.executable, "-c", sweeping], env=env, check=True)
    assert not [*(place / "temporary").iterdir()]
    if how != signal.SIGKILL:
        assert "resume with: llamatrain from-scratch --resume" in done.err
        error_lines = [line for line in done.err.splitlines() if "Traceback" in line]
        assert not error_lines


@LINUX
@pytest.mark.parametrize("how", ENDINGS)
def test_tokenizing_that_was_ended_leaves_nothing(how: signal.Signals, place: Path) -> None:
    """At once where it was asked to end; what was killed leaves it to the next run."""
    Path("large.txt").write_text(text(100_000) * (200 if how == signal.SIGKILL else 40))
    warm(place / "cache")  # kernels are there, so that only tokens are unfinished
    env = environment(LLAMATRAIN_CACHE=str(place / "cache"))
    words = (
        "finetune",
        "model.gguf",
        "large.txt",
        "--ctx",
        16,
        "--batch",
        1,
        "--iters",
        1,
        "--out",
        "run",
        "--overwrite",
    )

    def unfinished() -> list[Path]:
        """Tokens are written into a folder; a kernel being compiled is a file, which the next run removes."""
        return [path for path in (place / "cache").rglob(".new-*") if path.is_dir()]

    with started(*words, env=env) as process:
        until(lambda: bool(unfinished()), process)
        process.send_signal(how)
        done = finished(process)
    assert done.code != 0, "it was through with it before it was ended"
    if how == signal.SIGKILL:
        with started(*(word if word != "large.txt" else "text.txt" for word in words), env=env) as process:
            assert finished(process, 120).code == 0
    assert not unfinished()
