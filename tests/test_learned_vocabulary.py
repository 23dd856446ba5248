"""A vocabulary is learned in a process of its own: nothing of it is left here, and nothing of it outlives this one."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from llamatrain.data.tokenizer import learner, learning, new_vocabulary
from llamatrain.data.tokenizer.pretokenizers import LLAMA3
from llamatrain.data.tokenizer.symbols import ALPHABET
from llamatrain.errors import DataError

TEXTS = ["hello hello, hello again\n" * 9, "", "a hello that was never said: été, 你好 你好\n" * 7]
# Learns from words without end, says who learns once all the text is there, and waits.
PARENT = """
import random, sys
from llamatrain.data.tokenizer import learning, new_vocabulary
words = random.Random(1)
text = [" ".join("".join(words.choices("abcdefgh", k=40)) for _ in range(25_000)) for _ in range(5)]
answer = learning.answer_of
learning.answer_of = lambda child: print(child.pid, flush=True) or answer(child)
new_vocabulary.learned(text, 1 << 20)
"""


def runs(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def test_the_child_learns_what_would_be_learned_here() -> None:
    here = learner.merges(TEXTS, 300, LLAMA3, list(ALPHABET))
    assert learning.merges(TEXTS, 300, LLAMA3, list(ALPHABET)) == here
    assert ["h", "e"] in here or ["e", "l"] in here


def test_nothing_of_it_is_left() -> None:
    told = f"""
import sys
import tqdm
from llamatrain.data.tokenizer import new_vocabulary
from llamatrain.machine.memory import resident
before = resident()
new_vocabulary.learned([{TEXTS[0]!r}, *(" ".join(str(hash((i, j))) for j in range(20_000)) for i in range(10))], 2000)
print("tokenizers" in sys.modules, resident() - before)
"""
    run = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    imported, left = run.stdout.split()
    assert imported == "False"
    assert int(left) < 20e6


def test_where_no_process_can_be_started_it_is_learned_here(monkeypatch: pytest.MonkeyPatch) -> None:
    there = new_vocabulary.learned(TEXTS, 300)

    def refused(*args: object, **keys: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refused)
    assert new_vocabulary.learned(TEXTS, 300) == there
    monkeypatch.undo()
    monkeypatch.setattr(sys, "executable", "")
    assert new_vocabulary.learned(TEXTS, 300) == there


def test_what_goes_wrong_there_is_told_in_a_line() -> None:
    with pytest.raises(DataError, match="no vocabulary could be learned: ") as failed:
        learning.merges(TEXTS, 300, "(", list(ALPHABET))
    assert "\n" not in str(failed.value) and len(str(failed.value)) < 400


def test_a_child_that_is_ended_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = learning.answer_of

    def ended(child: "subprocess.Popen[bytes]") -> list[list[str]]:
        child.kill()
        return answer(child)

    monkeypatch.setattr(learning, "answer_of", ended)
    with pytest.raises(DataError, match="no vocabulary could be learned: the process that learns ended with signal 9"):
        learning.merges([" ".join(random.Random(1).choices("abcdefgh", k=100_000))], 1 << 20, LLAMA3, list(ALPHABET))


def test_an_error_in_the_text_stays_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[subprocess.Popen[bytes]]()
    send = learning.send
    monkeypatch.setattr(learning, "send", lambda child, *rest, **keys: started.append(child) or send(child, *rest, **keys))

    def broken() -> Iterator[str]:
        yield "a text"
        raise DataError("a.jsonl, line 2: no JSON")

    with pytest.raises(DataError, match="line 2: no JSON"):
        new_vocabulary.learned(broken(), 300)
    assert started[0].returncode is not None


@pytest.mark.skipif(sys.platform != "linux", reason="a process is looked up as Linux tells it")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_child_ends_with_its_parent(how: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout
        child = int(parent.stdout.readline())
        time.sleep(0.2)
        assert runs(child)  # it has yet some ten seconds to do
        os.kill(parent.pid, how)
        parent.wait()
        end = time.monotonic() + 60
        while runs(child) and time.monotonic() < end:
            time.sleep(0.02)
        left = runs(child)
        if left:
            os.kill(child, signal.SIGKILL)
        assert not left
