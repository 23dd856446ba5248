"""Runs a few trials of each kind of `scripts/torture.py`."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiny_gguf import every_kind, llama_tensors, write_arrays

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("kills", "disks", "inputs", "caches", "folders", "large", "live", "mutants")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc")


@pytest.fixture(scope="module")
def done() -> subprocess.CompletedProcess[str]:
    """All kinds at once: what they start from is made once."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    program = [sys.executable, str(ROOT / "scripts" / "torture.py"), "--short"]
    return subprocess.run(
        program, check=False, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )


def result(**other: Any) -> Any:
    from torments.processes import ProcessResult

    usual = {"words": (), "code": 0, "out": "", "err": "", "cpu": 0.1, "wall": 0.1, "peak": 10**8}
    return ProcessResult(**usual | other)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"code": -11}, "died of signal 11"),
        (
            {"code": 1, "err": "Traceback (most recent call last):\nValueError: x"},
            "a traceback: ValueError: x",
        ),
        ({"code": 1}, "exit code 1 with 0 lines of error"),
        ({"code": 2, "err": "error: one\nerror: two"}, "exit code 2 with 2 lines of error"),
        ({"err": "error: yet it went well"}, "exit code 0 with an error"),
        ({"code": 120}, "exit code 120, not one of [0, 1, 2]"),
        ({"code": 1, "err": "error: " + "x" * 5000}, "a line of 5007 characters"),
        ({"cpu": 4.1}, "took 4.1 s of CPU"),
        ({"peak": 201_000_000}, "peak of 201 MB"),
        ({"timed_out": True}, "did not end"),
        ({"survivors": ("a compiler",)}, "a process still runs: a compiler"),
    ],
)
def test_what_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any], words: str) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from torments.trial import find_faults

    assert not find_faults(result())
    assert not find_faults(result(code=1, err="error: no such file"))
    assert words in "\n".join(find_faults(result(**wrong)))


def test_a_gguf_file_is_taken_apart_and_put_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from torments.gguf import parse

    raw = write_arrays(tmp_path / "m.gguf", every_kind(), llama_tensors()).read_bytes()
    assert parse(raw).pack() == raw


@pytest.mark.parametrize("kind", KINDS)
def test_a_little_of_each_kind_does_no_harm(kind: str, done: subprocess.CompletedProcess[str]) -> None:
    table = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in done.stdout.splitlines()
        if line.startswith("|")
    ]
    rows = {row[0]: dict(zip(table[0], row, strict=True)) for row in table}
    assert kind in rows, done.stderr
    tried, skipped, failed = (rows[kind][name] for name in ("tried", "skipped", "failed"))
    told = [text for text in done.stderr.split("FAILED ") if f"--only {kind} " in text]
    assert int(failed) == 0, "\n".join(told)
    assert int(tried) > int(skipped)


def test_failures_are_told_by_the_exit_code(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == ("passed" not in done.stdout.splitlines()[-1]), done.stderr
