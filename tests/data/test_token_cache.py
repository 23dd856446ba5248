"""Entries of the token cache: whole or made anew, shared by runs at once, open for as long as they are read."""

import errno
import gc
import io
import json
import multiprocessing
import os
import resource
import stat
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import pytest

from llamatrain.data import token_cache
from llamatrain.data.token_cache import StoreLimits, TokenStore, TokenStoreWriter, open_or_build
from llamatrain.errors import DataError
from llamatrain.platform import cache_dir, locks, temp_files, terminal
from llamatrain.platform.temp_files import remove_path

TOKENS = np.arange(100_000, dtype=np.int32)
BOUNDS = StoreLimits(ids=len(TOKENS), files=1, documents=100)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("LLAMATRAIN_CACHE", str(tmp_path))
    token_cache.cache_folder.cache_clear()
    yield token_cache.cache_folder()
    token_cache.cache_folder.cache_clear()
    cache_dir.get_temp_folder.cache_clear()


def fill(writer: TokenStoreWriter) -> None:
    writer.write(TOKENS, (TOKENS % 2).astype(np.uint8))
    writer.end_document(0, 1)


def never(writer: TokenStoreWriter) -> None:
    raise AssertionError("the entry is there")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def check(store: TokenStore) -> None:
    assert store.marks is not None and store.key == "key"
    np.testing.assert_array_equal(store.tokens.read(0, len(TOKENS)), TOKENS)
    np.testing.assert_array_equal(store.tokens.read(70, 90), TOKENS[70:90])
    np.testing.assert_array_equal(store.marks.read(1, len(TOKENS)), TOKENS[1:] % 2)
    assert store.documents.tolist() == [(0, len(TOKENS), 0, 1, 0, False)]


def test_an_entry_is_found_again(folder: Path) -> None:
    check(open_or_build("key", fill, BOUNDS))
    check(open_or_build("key", never, BOUNDS))
    assert names(folder) == ["key"]


def test_an_empty_entry_is_found_again() -> None:
    for each in (lambda writer: None, never):
        store = open_or_build("empty", each, BOUNDS)
        assert store.marks is None and len(store.documents) == 0 and len(store.tokens.read(0, 9)) == 0


# ---- damage ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["tokens", "marks", "documents"])
@pytest.mark.parametrize("damage", ["one byte", "garbage", "short", "long", "gone", "folder"])
def test_a_damaged_file_is_made_anew(folder: Path, name: str, damage: str) -> None:
    open_or_build("key", fill, BOUNDS)
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
    check(open_or_build("key", fill, BOUNDS))
    check(open_or_build("key", never, BOUNDS))
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
    open_or_build("key", fill, BOUNDS)
    (folder / "key" / "sizes.json").write_text(text, "latin-1")
    check(open_or_build("key", fill, BOUNDS))
    check(open_or_build("key", never, BOUNDS))


@pytest.mark.parametrize("name", ["tokens", "marks", "documents", "more"])
def test_sizes_name_the_files_that_are_there(folder: Path, name: str) -> None:
    open_or_build("key", fill, BOUNDS)
    path = folder / "key" / "sizes.json"
    sizes = json.loads(path.read_text())
    path.write_text(
        json.dumps(
            {**sizes, "more": [0, 0]} if name == "more" else {k: v for k, v in sizes.items() if k != name}
        )
    )
    check(open_or_build("key", fill, BOUNDS))
    check(open_or_build("key", never, BOUNDS))


@pytest.mark.parametrize("kind", ["file", "empty folder", "other folder", "link", "pipe"])
def test_what_is_no_entry_gives_way(folder: Path, kind: str) -> None:
    place = folder / "key"
    if kind == "file":
        place.write_text("x")
    elif kind == "link":
        place.symlink_to("nowhere")
    elif kind == "pipe":
        os.mkfifo(place)
    else:
        (place / "sub" if kind == "other folder" else place).mkdir(parents=True)
    check(open_or_build("key", fill, BOUNDS))
    check(open_or_build("key", never, BOUNDS))
    assert names(folder) == ["key"]


# ---- what cannot be, though it is what was written ----------------------------


def crafted(place: Path, **arrays: np.ndarray) -> None:
    """An entry's files as somebody else might write them, with the sizes and sums that belong to them."""
    sums = json.loads((place / "sizes.json").read_text())
    for name, array in arrays.items():
        (place / name).write_bytes(array.tobytes())
        sums[name] = [array.nbytes, zlib.crc32(array.tobytes())]
    (place / "sizes.json").write_text(json.dumps(sums))


def document(**others: int) -> np.ndarray:
    made = np.zeros(1, token_cache.DOCUMENT)
    for name, value in {"size": len(TOKENS), "line": 1, **others}.items():
        made[name] = value
    return made


IMPOSSIBLE = {
    "an id that the vocabulary lacks": {"tokens": np.append(TOKENS[:-1], np.int32(len(TOKENS)))},
    "a huge id": {"tokens": np.append(TOKENS[:-1], np.int32(2**31 - 1))},
    "a negative id": {"tokens": np.append(TOKENS[:-1], np.int32(-1))},
    "fewer tokens than documents say": {"tokens": TOKENS[:-1]},
    "half a token": {"tokens": np.zeros(4 * len(TOKENS) - 1, np.uint8)},
    "a mark of 2": {"marks": np.full(len(TOKENS), 2, np.uint8)},
    "a mark too few": {"marks": np.ones(len(TOKENS) - 1, np.uint8)},
    "begins before": {"documents": document(begin=-8)},
    "begins behind": {"documents": document(begin=2**62)},
    "a size below 0": {"documents": document(size=-1)},
    "a size beyond": {"documents": document(size=2**62)},
    "sizes that overflow": {"documents": np.concatenate([document(size=2**62)] * 4)},
    "twice the same tokens": {"documents": np.concatenate([document()] * 2)},
    "no document": {"documents": document()[:0]},
    "half a document": {"documents": np.zeros(token_cache.DOCUMENT.itemsize // 2, np.uint8)},
    "another file": {"documents": document(file=1)},
    "a file below 0": {"documents": document(file=-1)},
    "no line": {"documents": document(line=0)},
    "the first target beyond": {"documents": document(first=len(TOKENS))},
    "the first target before": {"documents": document(first=-4)},
    "neither true nor false": {
        "documents": (document().view(np.uint8) | (np.arange(29) == 28) * np.uint8(7)).astype(np.uint8)
    },
    "more documents than data": {
        "documents": np.concatenate([document(), *[document(begin=len(TOKENS), size=0)] * 100])
    },
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_what_cannot_be_is_made_anew_whatever_its_sums(
    what: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_or_build("key", fill, BOUNDS)
    crafted(folder / "key", **IMPOSSIBLE[what])
    with terminal.show_log():
        check(open_or_build("key", fill, BOUNDS))
        assert (
            capsys.readouterr().err
            == f"{folder}/key: the cached tokens are damaged; encoding the data again\n"
        )
        check(open_or_build("key", never, BOUNDS))
    assert not capsys.readouterr().err


@pytest.mark.parametrize("name", ["tokens", "marks", "documents", "sizes.json"])
@pytest.mark.parametrize("kind", ["pipe", "device", "link to a device", "huge", "loop", "folder"])
def test_what_is_no_file_is_neither_waited_for_nor_read_for_ever(folder: Path, name: str, kind: str) -> None:
    open_or_build("key", fill, BOUNDS)
    path = folder / "key" / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device" and os.geteuid() == 0:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero
    elif kind == "huge":
        path.touch()
        os.truncate(path, 1 << 42)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path if kind == "loop" else "/dev/zero")
    check(open_or_build("key", fill, BOUNDS))
    check(open_or_build("key", never, BOUNDS))


def test_a_pipe_that_looks_like_left_behind_is_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / ".new-pipe")
    (folder / ".new-link").symlink_to("/dev/zero")
    check(open_or_build("key", fill, BOUNDS))


def test_an_entry_is_used_where_nothing_can_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a disk that is full, or only to be read."""
    open_or_build("key", fill, BOUNDS)
    token_cache.cache_folder.cache_clear()
    monkeypatch.setattr(tempfile, "TemporaryFile", no_room)
    monkeypatch.setattr(tempfile, "mkdtemp", no_room)
    cache_dir.get_temp_folder.cache_clear()
    check(open_or_build("key", never, BOUNDS))
    with pytest.raises(DataError, match="no folder for tokens is writable"):
        open_or_build("another", fill, BOUNDS)


def no_room(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_an_entry_that_is_cut_while_it_is_read_is_named(folder: Path) -> None:
    store = open_or_build("key", fill, BOUNDS)
    os.truncate(folder / "key" / "tokens", 1000)
    np.testing.assert_array_equal(store.tokens.read(0, 250), TOKENS[:250])
    with pytest.raises(DataError, match=f"^{folder}: the cached tokens were truncated"):
        store.tokens.read(240, 260)


# ---- several runs ----------------------------------------------------------


def test_a_faster_run_s_entry_stays_in_its_place(folder: Path) -> None:
    places = list[int]()

    def slow(writer: TokenStoreWriter) -> None:
        open_or_build("key", fill, BOUNDS)
        places.append((folder / "key").stat().st_ino)
        fill(writer)

    check(open_or_build("key", slow, BOUNDS))
    assert places == [(folder / "key").stat().st_ino] and names(folder) == ["key"]


def test_a_removed_entry_goes_on_being_read(folder: Path) -> None:
    for store in (open_or_build("key", fill, BOUNDS), open_or_build("key", never, BOUNDS)):  # made, found
        (folder / "key").rename(folder / "moved")
        check(store)
        (folder / "moved").rename(folder / "key")
    remove_path(folder / "key")
    check(store)


def test_files_are_closed_with_the_store() -> None:
    open_or_build("key", fill, BOUNDS)
    gc.collect()
    before = len(names(Path("/proc/self/fd")))
    stores = [open_or_build("key", never, BOUNDS) for _ in range(3)]
    assert len(names(Path("/proc/self/fd"))) == before + 6
    del stores
    gc.collect()
    assert len(names(Path("/proc/self/fd"))) == before


def test_more_files_than_a_program_may_open() -> None:
    old = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, old[1]), old[1]))
    try:
        open_or_build("key", fill, BOUNDS)
        stores = [open_or_build("key", never, BOUNDS) for _ in range(300)] if old[1] > 4096 else []
        for store in stores[::100]:
            check(store)
    finally:
        stores = []
        gc.collect()
        resource.setrlimit(resource.RLIMIT_NOFILE, old)


def run_at_once(barrier: Barrier, place: str, rounds: int) -> None:
    """Each round all runs find the entry gone or damaged, and all make it."""
    os.environ["LLAMATRAIN_CACHE"] = place
    folder = token_cache.cache_folder()
    for number in range(rounds):
        if barrier.wait(60) == 0 and (folder / "key").exists():
            (folder / "key" / "tokens").write_bytes(b"garbage") if number % 3 else remove_path(folder / "key")
        barrier.wait(60)
        store = open_or_build("key", fill, BOUNDS)
        check(store)
        barrier.wait(60)
        check(store)
        check(open_or_build("key", never, BOUNDS))


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
    def broken(writer: TokenStoreWriter) -> None:
        fill(writer)
        raise io.UnsupportedOperation("underlying stream is not seekable")

    with pytest.raises(io.UnsupportedOperation, match="seekable"):
        open_or_build("key", broken, BOUNDS)
    assert names(folder) == []


def test_errors_of_the_cache_name_its_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=f"^{folder}: .*No space left on device; .*LLAMATRAIN_CACHE"):
        open_or_build("key", fill, BOUNDS)
    assert names(folder) == []


def test_a_disk_that_is_full_is_said_once(folder: Path) -> None:
    """What stays in the buffer fails a second time as the file is closed."""

    def full(writer: TokenStoreWriter) -> None:
        writer.files["tokens"].close()
        writer.files["tokens"] = Path("/dev/full").open("wb")  # noqa: SIM115
        writer.write(TOKENS[:10])
        fill(writer)

    with pytest.raises(DataError, match="No space left on device"):
        open_or_build("key", full, BOUNDS)
    assert names(folder) == []


def test_what_killed_runs_left_is_removed_by_its_age(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no folder can be held."""
    monkeypatch.setattr(locks, "HAS_LOCKS", False)
    past = time.time() - 2 * temp_files.DAY
    for name in ("dead", "alive", "new"):
        (folder / f".new-{name}").mkdir()
        (folder / f".new-{name}" / "tokens").write_bytes(b"x")
    for path in (folder / ".new-dead" / "tokens", folder / ".new-dead", folder / ".new-alive"):
        os.utime(path, (past, past))  # a run that takes days still writes
    (folder / "old").mkdir()
    os.utime(folder / "old", (past, past))
    open_or_build("key", fill, BOUNDS)
    assert names(folder) == [".new-alive", ".new-new", "key", "old"]


MAKING = """
import time
import numpy as np
from llamatrain.data.token_cache import StoreLimits, open_or_build

def slow(writer):
    writer.write(np.arange(9, dtype=np.int32))
    print(writer.folder.name, flush=True)
    time.sleep(100)

open_or_build("slow", slow, StoreLimits(9, 1, 9))
"""


@pytest.mark.skipif(not locks.HAS_LOCKS, reason="folders cannot be held here")
def test_what_a_killed_run_left_is_removed_by_the_next(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while it lives, however long ago it wrote."""
    with subprocess.Popen([sys.executable, "-c", MAKING], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        left = other.stdout.readline().strip()
        past = time.time() - temp_files.DAY / 2
        for path in (*(folder / left).iterdir(), folder / left):
            os.utime(path, (past, past))
        try:
            open_or_build("key", fill, BOUNDS)
            assert names(folder) == [left, "key"]
        finally:
            other.kill()
    assert names(folder) == [left, "key"]
    os.utime(folder / left)  # once it is dead, however short ago
    open_or_build("another", fill, BOUNDS)
    assert names(folder) == ["another", "key"]


def test_it_goes_without_locks_and_limits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows: what is left behind goes after a day."""
    monkeypatch.setattr(locks, "HAS_LOCKS", False)
    past = time.time() - temp_files.DAY / 2
    (folder / ".new-young").mkdir()
    os.utime(folder / ".new-young", (past, past))
    check(open_or_build("key", fill, BOUNDS))
    assert names(folder) == [".new-young", "key"]
