"""How much memory there is: the machine's, and the control group's."""

from pathlib import Path

import pytest

from llamatrain.machine import memory


def group(folder: Path, limit: str, used: int, cached: int) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\nactive_file 1\n")
    return folder


def test_a_group_has_a_limit_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_of_machine", lambda: 1_000_000)
    for limit, used, cached, left in (("5000", 3000, 99, 2100), ("5000", 6000, 0, 0), ("max", 3000, 0, 1_000_000)):
        monkeypatch.setattr(memory, "GROUP", group(tmp_path, limit, used, cached))
        assert memory.available() == left
    monkeypatch.setattr(memory, "GROUP", tmp_path / "none")
    assert memory.available() == 1_000_000


def test_the_machine_has_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "GROUP", tmp_path)
    there = memory.available()
    assert there is None or 1 << 20 < there < 1 << 50
    monkeypatch.setattr(memory, "_of_machine", lambda: None)
    assert memory.available() is None


def test_what_this_process_holds() -> None:
    before = memory.resident()
    held = bytearray(b"x" * (1 << 26))
    assert (1 << 25) < memory.resident() - before < (1 << 28) and held
