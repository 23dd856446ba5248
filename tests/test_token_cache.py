"""Entries of the token cache: whole or made anew, shared by runs at once, open for as long as they are read."""

import errno
import gc
import io
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import pytest

from llamatrain.data import cache
from llamatrain.data.cache import Store, StoreWriter, stored
from llamatrain.errors import DataError
from llamatrain.machine.temporary import removed

TOKENS = np.arange(100_000, dtype=np.int32)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("LLAMATRAIN_CACHE", str(tmp_path))
    cache.cache_folder.cache_clear()
    yield cache.cache_folder()
    cache.cache_folder.cache_clear()


def fill(writer: StoreWriter) -> None:
    writer.write(TOKENS, (TOKENS % 2).astype(np.uint8))
    writer.end(0, 1)


def never(writer: StoreWriter) -> None:
    raise AssertionError("the entry is there")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def check(store: Store) -> None:
    assert store.marks is not None and store.key == "key"
    np.testing.assert_array_equal(store.tokens.read(0, len(TOKENS)), TOKENS)
    np.testing.assert_array_equal(store.tokens.read(70, 90), TOKENS[70:90])
    np.testing.assert_array_equal(store.marks.read(1, len(TOKENS)), TOKENS[1:] % 2)
    assert store.documents.tolist() == [(0, len(TOKENS), 0, 1, 0, False)]


def test_an_entry_is_found_again(folder: Path) -> None:
    check(stored("key", fill))
    check(stored("key", never))
    assert names(folder) == ["key"]


def test_an_empty_entry_is_found_again() -> None:
    for each in (lambda writer: None, never):
        store = stored("empty", each)
        assert store.marks is None and len(store.documents) == 0 and len(store.tokens.read(0, 9)) == 0


# ---- damage ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["tokens", "marks", "documents"])
@pytest.mark.parametrize("damage", ["one byte", "garbage", "short", "long", "gone", "folder"])
def test_a_damaged_file_is_made_anew(folder: Path, name: str, damage: str) -> None:
    stored("key", fill)
    path = folder / "key" / name
    content = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage != "gone":
        path.write_bytes(
            {
                "one byte": content[:-1] + bytes([content[-1] ^ 1]),
                "garbage": os.urandom(len(content)),
                "short": content[:-4],
                "long": content * 2,
            }[damage]
        )
    check(stored("key", fill))
    check(stored("key", never))
    assert names(folder) == ["key"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "1",
        '"tokens"',
        "[]",
        '["tokens", "documents"]',
        "{}",
        '{"tokens": 400000}',
        "[" * 100_000,
        "\xff",
        '{"tokens": null, "marks": [], "documents": {}}',
        '{"tokens": 400000, "marks": 100000, "documents": 29}',
    ],
)
def test_broken_sizes_are_not_whole(folder: Path, text: str) -> None:
    stored("key", fill)
    (folder / "key" / "sizes.json").write_text(text, "latin-1")
    check(stored("key", fill))
    check(stored("key", never))


@pytest.mark.parametrize("name", ["tokens", "marks", "documents", "more"])
def test_sizes_name_the_files_that_are_there(folder: Path, name: str) -> None:
    stored("key", fill)
    path = folder / "key" / "sizes.json"
    sizes = json.loads(path.read_text())
    path.write_text(json.dumps({**sizes, "more": [0, 0]} if name == "more" else {k: v for k, v in sizes.items() if k != name}))
    check(stored("key", fill))
    check(stored("key", never))


@pytest.mark.parametrize("kind", ["file", "empty folder", "other folder", "link"])
def test_what_is_no_entry_gives_way(folder: Path, kind: str) -> None:
    place = folder / "key"
    if kind == "file":
        place.write_text("x")
    elif kind == "link":
        place.symlink_to("nowhere")
    else:
        (place / "sub" if kind == "other folder" else place).mkdir(parents=True)
    check(stored("key", fill))
    check(stored("key", never))
    assert names(folder) == ["key"]


# ---- several runs ----------------------------------------------------------


def test_a_faster_run_s_entry_stays_in_its_place(folder: Path) -> None:
    places = list[int]()

    def slow(writer: StoreWriter) -> None:
        stored("key", fill)
        places.append((folder / "key").stat().st_ino)
        fill(writer)

    check(stored("key", slow))
    assert places == [(folder / "key").stat().st_ino] and names(folder) == ["key"]


def test_a_removed_entry_goes_on_being_read(folder: Path) -> None:
    for store in (stored("key", fill), stored("key", never)):  # made, found
        (folder / "key").rename(folder / "moved")
        check(store)
        (folder / "moved").rename(folder / "key")
    removed(folder / "key")
    check(store)


def test_files_are_closed_with_the_store() -> None:
    stored("key", fill)
    gc.collect()
    before = len(names(Path("/proc/self/fd")))
    stores = [stored("key", never) for _ in range(3)]
    assert len(names(Path("/proc/self/fd"))) == before + 6
    del stores
    gc.collect()
    assert len(names(Path("/proc/self/fd"))) == before


def test_more_files_than_a_program_may_open() -> None:
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, old[1]), old[1]))
    try:
        stored("key", fill)
        stores = [stored("key", never) for _ in range(300)] if old[1] > 4096 else []
        for store in stores[::100]:
            check(store)
    finally:
        stores = []
        gc.collect()
        resource.setrlimit(resource.RLIMIT_NOFILE, old)


def run_at_once(barrier: Barrier, place: str, rounds: int) -> None:
    """Each round all runs find the entry gone or damaged, and all make it."""
    os.environ["LLAMATRAIN_CACHE"] = place
    folder = cache.cache_folder()
    for number in range(rounds):
        if barrier.wait(60) == 0 and (folder / "key").exists():
            (folder / "key" / "tokens").write_bytes(b"garbage") if number % 3 else removed(folder / "key")
        barrier.wait(60)
        store = stored("key", fill)
        check(store)
        barrier.wait(60)
        check(store)
        check(stored("key", never))


def test_runs_at_once_do_not_disturb_each_other(tmp_path: Path, folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(4)
    runs = [context.Process(target=run_at_once, args=(barrier, str(tmp_path), 40)) for _ in range(4)]
    for run in runs:
        run.start()
    for run in runs:
        run.join(120)
    assert [run.exitcode for run in runs] == [0] * 4
    assert names(folder) == ["key"]


# ---- errors ----------------------------------------------------------------


def test_errors_of_the_sources_are_not_the_cache_s(folder: Path) -> None:
    def broken(writer: StoreWriter) -> None:
        fill(writer)
        raise io.UnsupportedOperation("underlying stream is not seekable")

    with pytest.raises(io.UnsupportedOperation, match="seekable"):
        stored("key", broken)
    assert names(folder) == []


def test_errors_of_the_cache_name_its_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=f"^{folder}: tokens cannot be kept there: No space left on device; LLAMATRAIN_CACHE"):
        stored("key", fill)
    assert names(folder) == []


def test_a_disk_that_is_full_is_said_once(folder: Path) -> None:
    """What stays in the buffer fails a second time as the file is closed."""

    def full(writer: StoreWriter) -> None:
        writer.files["tokens"].close()
        writer.files["tokens"] = Path("/dev/full").open("wb")  # noqa: SIM115
        writer.write(TOKENS[:10])
        fill(writer)

    with pytest.raises(DataError, match="No space left on device"):
        stored("key", full)
    assert names(folder) == []


def test_what_killed_runs_left_is_removed_by_its_age(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no folder can be held."""
    monkeypatch.setattr(cache, "fcntl", None)
    past = time.time() - 2 * cache.DAY
    for name in ("dead", "alive", "new"):
        (folder / f".new-{name}").mkdir()
        (folder / f".new-{name}" / "tokens").write_bytes(b"x")
    for path in (folder / ".new-dead" / "tokens", folder / ".new-dead", folder / ".new-alive"):
        os.utime(path, (past, past))  # a run that takes days still writes
    (folder / "old").mkdir()
    os.utime(folder / "old", (past, past))
    stored("key", fill)
    assert names(folder) == [".new-alive", ".new-new", "key", "old"]


MAKING = """
import time
import numpy as np
from llamatrain.data.cache import stored

def slow(writer):
    writer.write(np.arange(9, dtype=np.int32))
    print(writer.folder.name, flush=True)
    time.sleep(100)

stored("slow", slow)
"""


@pytest.mark.skipif(cache.fcntl is None, reason="folders cannot be held here")
def test_what_a_killed_run_left_is_removed_by_the_next(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while it lives, however long ago it wrote."""
    with subprocess.Popen([sys.executable, "-c", MAKING], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        left = other.stdout.readline().strip()
        past = time.time() - cache.DAY / 2
        for path in (*(folder / left).iterdir(), folder / left):
            os.utime(path, (past, past))
        try:
            stored("key", fill)
            assert names(folder) == [left, "key"]
        finally:
            other.kill()
    assert names(folder) == [left, "key"]
    os.utime(folder / left)  # once it is dead, however short ago
    stored("another", fill)
    assert names(folder) == ["another", "key"]


def test_it_goes_without_locks_and_limits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows: what is left behind goes after a day."""
    monkeypatch.setattr(cache, "fcntl", None)
    monkeypatch.setitem(sys.modules, "resource", None)
    past = time.time() - cache.DAY / 2
    (folder / ".new-young").mkdir()
    os.utime(folder / ".new-young", (past, past))
    check(stored("key", fill))
    assert names(folder) == [".new-young", "key"]
