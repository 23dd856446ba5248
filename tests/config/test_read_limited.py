"""Files that are read whole have an end, and are files."""

import os
import sys
from pathlib import Path

import pytest

from tests.helpers.cli import Argument, run, started
from tests.helpers.timeout import in_time
from tests.helpers.tiny_gguf import llama_metadata, llama_tensors, write_arrays

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="its devices")
SECONDS = 3


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the cat sat on the mat. " * 20)
    os.mkfifo("pipe")
    with Path("large").open("wb") as file:
        file.truncate(10**10)  # zeros, which take no room
    return write_arrays(tmp_path / "m.gguf", llama_metadata(), llama_tensors())


READERS: list[tuple[Argument, ...]] = [
    ("generate", "m.gguf", "--file", "IT"),
    ("from-scratch", "text.txt", "--config", "IT", "--out", "run"),
    ("plan", "finetune", "m.gguf", "text.txt", "--config", "IT"),
    ("finetune", "IT", "text.txt", "--out", "run"),
    ("finetune", "IT", "text.txt", "--resume", "IT", "--out", "run"),
    ("from-scratch", "text.txt", "--vocab-from", "IT", "--out", "run"),
    ("from-scratch", "--resume", "IT"),
    ("generate", "m.gguf", "--lora", "IT"),
    ("inspect", "IT"),
]


@pytest.mark.parametrize("place", ["/dev/zero", "pipe", "large"])
@pytest.mark.parametrize("words", READERS, ids=lambda words: " ".join(map(str, words)))
def test_what_has_no_end_or_no_beginning(words: tuple[Argument, ...], place: str, model: Path) -> None:
    with in_time(SECONDS):
        done = run(*(place if word == "IT" else word for word in words))
    assert done.code in (1, 2) and len(done.errors) == 1 and place in done.errors[0], done.err


@pytest.mark.parametrize(
    "words", [("generate", "m.gguf", "--prompt", "-"), ("preview", "-", "--model", "m.gguf")]
)
def test_standard_input_without_an_end(words: tuple[Argument, ...], model: Path) -> None:
    with Path("/dev/zero").open("rb") as zeros, started(*words, stdin=zeros, preexec_fn=limited) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and err.startswith("error: standard input: ") and err.count("\n") == 1, err


def limited() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (30, 30))


def test_a_pipe_that_is_open_is_read(model: Path) -> None:
    """As a shell hands it over: --file <(a command)."""
    end, begin = os.pipe()
    os.write(begin, b"the cat\n")
    os.close(begin)
    done = run("generate", "m.gguf", "--file", f"/dev/fd/{end}", "-n", 1, "--ctx", 16)
    os.close(end)
    assert done.code == 0, done.err
