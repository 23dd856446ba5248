"""Signals while the program is still being loaded, and at any moment after: they end it, and nothing is said."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.cli import Argument, environment
from tests.helpers.tiny_gguf import llama_metadata, llama_tensors, write_arrays

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals are others there")
# Before its first line Python itself is at work, and tells of an interrupt in its own way: this says when that is over.
PROGRAM = """
import os, sys
class Told:
    def find_spec(self, name, *rest):
        if name == "llamatrain.cli":
            os.write(3, b".")
sys.meta_path.insert(0, Told())
from llamatrain.__main__ import main
main()
"""
COMMANDS: list[tuple[Argument, ...]] = [
    ("generate", "m.gguf", "-n", 1000, "--ctx", 1001, "--prompt", "a"),
    ("from-scratch", "--vocab-size", 20, "--iters", 100_000, "--out", "run", "--overwrite"),
]


def ended(words: tuple[Argument, ...], number: int, after: float) -> tuple[int, str]:
    place, told = os.pipe()
    line = f'exec 3>&{told}; exec "$@"'
    process = subprocess.Popen(
        ["bash", "-c", line, "bash", sys.executable, "-c", PROGRAM, *map(str, words)],
        env=environment(),
        pass_fds=[told],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    os.close(told)
    assert os.read(place, 1) == b"."
    os.close(place)
    time.sleep(after)
    os.killpg(process.pid, number)  # as a terminal does: to those that it has started, too
    _, err = process.communicate(timeout=60)
    return process.returncode, err


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
@pytest.mark.parametrize(
    "steps", [range(0, 100, 30), pytest.param(range(0, 1000, 5), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_nothing_is_said(
    words: tuple[Argument, ...],
    steps: range,
    number: int,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_arrays(Path("m.gguf"), llama_metadata(), llama_tensors())
    for after in steps:
        returned, err = ended(words, number, after / 1000)
        assert returned == code, (after, returned, err)
        assert "Traceback" not in err and "KeyboardInterrupt" not in err, (after, err)


def test_one_that_is_ignored_stays_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a shell starts what goes on in the background."""
    monkeypatch.chdir(tmp_path)
    write_arrays(Path("m.gguf"), llama_metadata(), llama_tensors())
    words = [sys.executable, "-m", "llamatrain", "generate", "m.gguf", "-n", "1", "--ctx", "8"]
    program = ["bash", "-c", 'trap "" INT; exec "$@"', "bash", *words]
    with subprocess.Popen(program, env=environment(), stdout=subprocess.PIPE) as process:
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_the_command_begins_there() -> None:
    """What `pip` writes imports nothing before."""
    import tomllib

    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert tomllib.loads(text)["project"]["scripts"]["llamatrain"] == "llamatrain.__main__:main"
    loaded = "import sys; before = {*sys.modules}; import llamatrain.__main__; print(*sorted({*sys.modules} - before))"
    found = subprocess.run(
        [sys.executable, "-c", loaded], env=environment(), capture_output=True, text=True, check=True
    )
    assert [name for name in found.stdout.split() if "." in name] == ["llamatrain.__main__"]
