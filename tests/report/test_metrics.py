"""metrics.jsonl: what is written, when it lies in the file, and what of it a resumed run keeps."""

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from llamatrain.errors import FileError
from llamatrain.report.metrics import FLUSH_INTERVAL, Metrics


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def line(step: int, **more: object) -> str:
    return json.dumps({"step": step, "loss": step / 8, **more}) + "\n"


def test_lines_are_json_objects_in_their_order(path: Path) -> None:
    with Metrics.create(path) as metrics:
        metrics.write({"step": 1, "loss": 0.1 + 0.2})
        metrics.write({"step": 1, "val_loss": 2.5, "val_tokens": 4096})
        assert metrics.read() == [
            {"step": 1, "loss": 0.1 + 0.2},
            {"step": 1, "val_loss": 2.5, "val_tokens": 4096},
        ]
    assert path.read_text().splitlines()[0] == '{"step": 1, "loss": 0.30000000000000004}'


def test_what_json_has_no_word_for_is_null(path: Path) -> None:
    with Metrics.create(path) as metrics:
        metrics.write({"step": 1, "loss": math.nan, "lr": 0.5, "grad_norm": -math.inf, "tokens": 3})
        metrics.write({"step": 2, "loss": np.float32(np.inf)})
        metrics.write({"step": np.int64(3), "loss": np.float32(0.5)})
    assert path.read_text().splitlines() == [
        '{"step": 1, "loss": null, "lr": 0.5, "grad_norm": null, "tokens": 3}',
        '{"step": 2, "loss": null}',
        '{"step": 3, "loss": 0.5}',
    ]


def test_lines_wait_for_a_moment_or_for_a_flush(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("llamatrain.report.metrics.monotonic", lambda: now)
    with Metrics.create(path) as metrics:
        metrics.write({"step": 1})
        metrics.write({"step": 2})
        assert len(path.read_text().splitlines()) == 1
        metrics.flush()
        assert len(path.read_text().splitlines()) == 2
        metrics.write({"step": 3})
        now += FLUSH_INTERVAL
        metrics.write({"step": 4})
        assert len(path.read_text().splitlines()) == 4


def test_a_resumed_run_goes_on_after_its_checkpoint(path: Path) -> None:
    kept = line(1) + line(2) + '{"step": 2, "val_loss": 0.5, "val_tokens": 9}\n'
    path.write_text(kept + line(3) + '{"step": 3, "val_loss": 0.25, "val_tokens": 9}\n' + '{"step": 4, "lo')
    with Metrics.resume(path, 2) as metrics:
        assert path.read_text() == kept
        metrics.write({"step": 3, "loss": 7.0})
    assert path.read_text() == kept + '{"step": 3, "loss": 7.0}\n'
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "damage",
    [
        b"\x00" * 50,
        b"[1, 2]\n",
        b"{}\n",
        b'{"step": "1"}\n',
        b'{"step": true}\n',
        b'{"step": 1, "loss": "\xff\xfe"}\n',
        b'{"step": ' + b"9" * 4000 + b"}\n",
        b'{"":' * 1000,
        b'{"step": 1' + b" " * 100_000 + b"}\n",
        b"\n\n",
    ],
)
def test_what_is_no_line_is_cut(path: Path, damage: bytes) -> None:
    path.write_bytes(line(1).encode() + damage)
    with Metrics.resume(path, 5) as metrics:
        metrics.write({"step": 2})
        assert [found["step"] for found in metrics.read()] == [1, 2]


def test_a_last_line_without_its_end_is_given_one(path: Path) -> None:
    path.write_text(line(1).strip())
    with Metrics.resume(path, 1) as metrics:
        metrics.write({"step": 2})
    assert path.read_text() == line(1) + '{"step": 2}\n'


def test_a_resumed_run_may_have_lost_its_lines(path: Path) -> None:
    with Metrics.resume(path, 7) as metrics:
        assert metrics.read() == []


def test_a_cut_that_fails_leaves_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(line(1) + line(2))

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(FileError, match=r"metrics\.jsonl: cannot be written: No space left on device"):
        Metrics.resume(path, 1)
    assert path.read_text() == line(1) + line(2)
    assert list(path.parent.iterdir()) == [path]


def test_a_place_that_cannot_be_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be written: No such file"):
        Metrics.create(tmp_path / "none" / "metrics.jsonl")
    with pytest.raises(FileError, match="this is a folder"):
        Metrics.resume(tmp_path, 1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_full_disk_is_told(tmp_path: Path) -> None:
    metrics = Metrics.create(tmp_path / "metrics.jsonl")
    full = os.open("/dev/full", os.O_RDWR)
    kept = os.dup(metrics._file.fileno())  # type: ignore[union-attr]
    os.dup2(full, metrics._file.fileno())  # type: ignore[union-attr]
    metrics.write({"step": 1})  # waits
    with pytest.raises(FileError, match="cannot be written: No space left on device"):
        metrics.flush()
    metrics.write({"step": 2})
    with pytest.raises(FileError, match="No space left"):
        metrics.close()
    metrics.close()  # and is no news the second time
    for place in (full, kept):
        os.close(place)
