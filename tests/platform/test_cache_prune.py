"""The cache stays small by itself: what is old or too much goes, what is used or held stays, and it is looked at once a day."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llamatrain.compiler.cache import CodeCache, cache_key
from llamatrain.data import token_cache
from llamatrain.data.token_cache import StoreLimits, TokenStoreWriter, open_or_build
from llamatrain.platform import cache_dir, cache_prune
from llamatrain.platform.cache_prune import MAX_AGE, MIN_INTERVAL, STAMP, mark_used, over_limit, prune, remove
from llamatrain.platform.temp_files import DAY, NEW_PREFIX

BOUNDS = StoreLimits(ids=1000, files=1, documents=10)
OTHER, OWN = "0123456789abcdef", "f" * 16


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache_dir.CACHE_VARIABLE, str(tmp_path))
    token_cache.cache_folder.cache_clear()
    yield tmp_path / cache_dir.NAME  # type: ignore[misc]
    token_cache.cache_folder.cache_clear()


def aged(path: Path, seconds: float) -> Path:
    when = time.time() - seconds
    os.utime(path, (when, when))
    return path


def kernels(root: Path, name: str, age: float, nbytes: int = 100) -> Path:
    (root / name).mkdir(parents=True)
    (root / name / "llamatrain.some.kernel-0").write_bytes(bytes(nbytes))
    return aged(root / name, age)


def fill(writer: TokenStoreWriter) -> None:
    writer.write(np.arange(100, dtype=np.int32))
    writer.end_document(0, 1)


def never(writer: TokenStoreWriter) -> None:
    raise AssertionError("it is there")


def entry(root: Path, key: str, age: float) -> Path:
    store = open_or_build(key, fill, BOUNDS)
    assert store.key == key
    del store
    return aged(root / "tokens" / key, age)


def due(root: Path) -> None:
    (root / STAMP).unlink(missing_ok=True)


def test_kernels_of_other_versions_go_after_a_month(root: Path) -> None:
    old, newer, own = (
        kernels(root, OTHER, MAX_AGE + 1),
        kernels(root, "e" * 16, MAX_AGE - 60),
        kernels(root, OWN, MAX_AGE + 1),
    )
    prune(root, OWN)
    assert not old.exists() and newer.exists() and own.exists()
    assert sorted(path.name for path in root.iterdir()) == sorted([STAMP, newer.name, own.name])


def test_models_that_nobody_used_for_a_month_go(root: Path) -> None:
    folder = root / "models"
    folder.mkdir(parents=True)
    for name in ("old.gguf", "new.gguf", "notes.txt"):
        (folder / name).write_bytes(bytes(9))
    aged(folder / "old.gguf", MAX_AGE + 1)
    aged(folder / "new.gguf", MAX_AGE - 60)
    aged(folder / "notes.txt", MAX_AGE + 1)
    prune(root, OWN)
    assert sorted(path.name for path in folder.iterdir()) == ["new.gguf", "notes.txt"]


def test_what_is_no_kernels_folder_stays(root: Path, tmp_path: Path) -> None:
    outside = kernels(tmp_path, "outside", 2 * MAX_AGE)
    (root / "notes").mkdir(parents=True)
    aged(root / "notes", 2 * MAX_AGE)
    (root / OTHER).symlink_to(outside)
    (root / ("a" * 16)).write_bytes(b"a file")
    prune(root, OWN)
    assert (
        outside.exists()
        and (root / "notes").exists()
        and (root / OTHER).exists()
        and (root / ("a" * 16)).exists()
    )


def test_once_a_day(root: Path) -> None:
    kernels(root, OTHER, MAX_AGE + 1)
    prune(root, OWN)
    late = kernels(root, "e" * 16, MAX_AGE + 1)
    prune(root, OWN)
    assert late.exists()
    aged(root / STAMP, MIN_INTERVAL + 1)
    prune(root, OWN)
    assert not late.exists()


def test_tokens_that_are_read_stay_and_others_go_the_oldest_first(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oldest, older, newest = (
        entry(root, name, age) for name, age in (("a", 9 * DAY), ("b", 8 * DAY), ("c", 0))
    )
    size = cache_prune.disk_usage(oldest)
    reading = open_or_build("a", never, BOUNDS)
    aged(oldest, 9 * DAY)
    monkeypatch.setattr(cache_prune, "MAX_TOKEN_BYTES", size + size // 2)
    due(root)
    prune(root, OWN)
    assert oldest.exists() and not older.exists() and newest.exists()
    assert reading.tokens.read(0, 3).tolist() == [0, 1, 2]
    del reading
    due(root)
    prune(root, OWN)
    assert not oldest.exists() and newest.exists() and not list((root / "tokens").glob(f"{NEW_PREFIX}*"))


def test_tokens_that_nobody_used_for_long_go_where_new_ones_are_made(root: Path) -> None:
    old = entry(root, "a", MAX_AGE + 1)
    due(root)
    assert open_or_build("b", fill, BOUNDS).tokens.read(99, 100).tolist() == [99]
    assert not old.exists() and (root / "tokens" / "b").exists() and (root / STAMP).exists()


def test_use_is_noted_by_reading(root: Path) -> None:
    place = entry(root, "a", 5 * DAY)
    open_or_build("a", never, BOUNDS)
    assert time.time() - place.stat().st_mtime < DAY
    lately = aged(place, MIN_INTERVAL - 60).stat().st_mtime
    mark_used(place)
    assert place.stat().st_mtime == lately
    mark_used(place / "nowhere")


def test_use_of_kernels_is_noted_when_they_are_found(root: Path) -> None:
    code = CodeCache()
    folder = kernels(root, code.store.folder.name if code.store.folder else "", 5 * DAY)
    assert folder.name == cache_key()
    code.mark_used()
    assert time.time() - folder.stat().st_mtime < DAY


def test_all_that_is_read_in_another_process_is_left_to_it(root: Path) -> None:
    place = entry(root, "a", MAX_AGE + 1)
    script = """
import sys
from tests.platform.test_cache_prune import BOUNDS, never, open_or_build
store = open_or_build("a", never, BOUNDS)
print("open", flush=True)
sys.stdin.readline()
print(store.tokens.read(0, 100).sum())
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as reader:  # type: ignore[call-overload]
        assert reader.stdout.readline() == "open\n"
        assert remove(cache_prune.list_tokens(root)) == [] and place.exists()
        assert reader.communicate("\n")[0] == "4950\n"
    (gone,) = remove(cache_prune.list_tokens(root))
    assert gone.nbytes > 400 and not place.exists()


def test_what_dead_processes_left_goes(root: Path) -> None:
    for folder in (root / OWN, root / "tokens"):
        (folder / f"{NEW_PREFIX}left").mkdir(parents=True)
    assert len(cache_prune.find_all_leftovers(root)) == 2
    prune(root, OWN)
    assert not cache_prune.find_all_leftovers(root) and not (root / "tokens" / f"{NEW_PREFIX}left").exists()


@pytest.mark.parametrize(
    "spoil", [lambda root: root.rmdir(), lambda root: (root / STAMP).symlink_to(root / "no" / "where")]
)
def test_where_nothing_can_be_noted_nothing_goes(root: Path, spoil: Callable[[Path], None]) -> None:
    root.mkdir(parents=True)
    spoil(root)
    prune(root, OWN)
    assert not (root / STAMP).exists()


def test_bounds_are_of_all_that_stays() -> None:
    now = time.time()
    entries = [
        cache_prune.CacheFolder(Path(str(age)), Path(str(age)), 3 << 30, now - age)
        for age in (0, 10, 20, MAX_AGE + 9)
    ]
    assert [each.path.name for each in over_limit(entries)] == ["20", str(MAX_AGE + 9)]
