"""How much memory there is: the machine's, and the control group's; and what is done without taking more of it."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llamatrain.kernels.reference.registry import run_kernel
from llamatrain.model.transformer import dense_mask, dense_mask_chunks
from llamatrain.platform import memory


def group(folder: Path, limit: str, used: int, cached: int) -> Path:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\nactive_file 1\n")
    return folder


def test_a_group_has_a_limit_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_machine_available", lambda: 1_000_000)
    for limit, used, cached, left in (
        ("5000", 3000, 99, 2100),
        ("5000", 6000, 0, 0),
        ("max", 3000, 0, 1_000_000),
    ):
        monkeypatch.setattr(memory, "CGROUP", group(tmp_path, limit, used, cached))
        assert memory.available_bytes() == left
    monkeypatch.setattr(memory, "CGROUP", tmp_path / "none")
    assert memory.available_bytes() == 1_000_000


def test_the_machine_has_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    there = memory.available_bytes()
    assert there is None or 1 << 20 < there < 1 << 50
    monkeypatch.setattr(memory, "_machine_available", lambda: None)
    assert memory.available_bytes() is None


def test_what_this_process_holds() -> None:
    before = memory.resident_bytes()
    held = bytearray(b"x" * (1 << 26))
    assert (1 << 25) < memory.resident_bytes() - before < (1 << 28) and held


# ---- what is not taken -----------------------------------------------------


def most_taken(what: Callable[[], None]) -> int:
    """Bytes that Python and numpy had at once beside what was there."""
    tracemalloc.start()
    try:
        what()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_mask_is_made_in_pieces() -> None:
    starts = np.random.default_rng(1).integers(0, 600, (2, 600)).astype(np.int32)
    made = np.full((2, 600, 600), np.nan, np.float32)

    def fill() -> None:
        for queries, mask in dense_mask_chunks(starts):
            made[:, queries] = mask

    assert most_taken(fill) < made.nbytes / 2
    np.testing.assert_array_equal(made, dense_mask(starts))


@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_sums_are_made_where_they_are_to_be(name: str) -> None:
    scores, mask = np.full((2, 8, 100, 100), 3, np.float32), np.full((2, 1, 100, 100), 2, np.float32)
    assert most_taken(lambda: run_kernel(name, [scores], [scores, mask], {})) < scores.nbytes / 2
    assert np.all(scores == {"add": 5, "sub": 1, "mul": 6}[name])
