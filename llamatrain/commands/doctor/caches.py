"""Describes and cleans the caches and temporary files."""

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from llamatrain.commands.doctor.problems import Fact, Findings, Problem, bytes_fact, format_size, make_fact


def cache_root() -> Path | None:
    """Return the cache folder, or None without a home."""
    from llamatrain.platform.cache_dir import default_cache_dir

    folder = default_cache_dir("tokens")
    return folder.parent if folder else None


def describe_caches() -> Findings:
    """Yield facts about the caches."""
    from llamatrain.platform.cache_dir import CACHE_VARIABLE, find_write_problem

    root = cache_root()
    yield make_fact("folder", None if root is None else str(root))
    if root is None:
        yield Problem("there is no home folder for the cache", f"set {CACHE_VARIABLE} to a folder")
    elif problem := find_write_problem(root):
        yield Problem(problem, f"set {CACHE_VARIABLE} to another folder")
    if root is not None:
        with suppress(OSError):
            yield bytes_fact("room", shutil.disk_usage(root).free)
        yield from describe_contents(root)
    yield from describe_temp_files()


def describe_contents(root: Path) -> Findings:
    """Yield facts about kernels, tokens and other files in the cache."""
    from llamatrain.compiler.cache import cache_key
    from llamatrain.platform import cache_prune, temp_files

    folders, entries = cache_prune.list_kernels(root), cache_prune.list_tokens(root)
    own = [folder for folder in folders if folder.path.name == cache_key()]
    old = [folder for folder in folders if folder not in own]
    days, limit = cache_prune.MAX_AGE // temp_files.DAY, format_size(cache_prune.MAX_TOKEN_BYTES)
    yield folders_fact("kernels", own)
    yield folders_fact("kernels of other versions", old, f"; deleted {days} days after their last use")
    yield folders_fact("tokens", entries, f"; deleted {days} days after their last use, or beyond {limit}")
    models = cache_prune.list_models(root)
    yield folders_fact("imported models", models, f"; deleted {days} days after their last use", thing="file")
    known = {
        cache_prune.TOKEN_FOLDER,
        cache_prune.MODEL_FOLDER,
        cache_prune.STAMP,
        *(folder.path.name for folder in folders),
    }
    with suppress(OSError):
        for path in sorted(root.iterdir()):
            if path.name not in known and not path.name.startswith(temp_files.NEW_PREFIX):
                yield bytes_fact(path.name, cache_prune.disk_usage(path))
    yield files_fact("left by dead processes", cache_prune.find_all_leftovers(root))


def folders_fact(name: str, folders: list[Any], more: str = "", thing: str = "folder") -> Fact:
    """Return a fact about some folders, or about other things in a cache: their number and size."""
    nbytes = sum(folder.nbytes for folder in folders)
    return Fact(
        name,
        {f"{thing}s": len(folders), "bytes": nbytes},
        f"{format_size(nbytes)} in {format_count(folders, thing)}{more if folders else ''}",
    )


def files_fact(name: str, paths: list[Path]) -> Fact:
    """Return a fact about some files: their number and size."""
    from llamatrain.platform.cache_prune import disk_usage

    nbytes = sum(map(disk_usage, paths))
    return Fact(
        name,
        {"files": len(paths), "bytes": nbytes},
        f"{format_size(nbytes)} in {format_count(paths, 'file')}" if paths else "nothing",
    )


def format_count(things: list[Any], name: str) -> str:
    """Return a number with a noun."""
    return f"{len(things)} {name}{'s' * (len(things) != 1)}"


def describe_temp_files() -> Findings:
    """Yield facts about temporary files."""
    from llamatrain.platform.cache_prune import find_leftovers
    from llamatrain.platform.temp_files import TEMP_PREFIX

    try:
        folder = Path(tempfile.gettempdir())
    except OSError as error:
        yield Problem(f"there is no folder for temporary files: {error.strerror}", "set TMPDIR to one")
        return
    yield make_fact("temporary files", str(folder))
    yield files_fact("left there by dead processes", find_leftovers(folder, TEMP_PREFIX))


def clean_caches() -> Findings:
    """Remove old kernels, unused tokens, imported models, leftovers of dead processes, and damaged files."""
    from llamatrain.compiler.cache import cache_key
    from llamatrain.platform import cache_prune, temp_files

    if root := cache_root():
        own = root / cache_key()
        yield folders_fact(
            "old kernels",
            cache_prune.remove(entry for entry in cache_prune.list_kernels(root) if entry.path != own),
        )
        yield folders_fact("tokens", cache_prune.remove(cache_prune.list_tokens(root)))
        yield folders_fact("imported models", cache_prune.remove(cache_prune.list_models(root)), thing="file")
        yield remove_files("damaged kernels", find_damaged(own))
        yield remove_files("left by dead processes", cache_prune.find_all_leftovers(root))
    yield remove_files(
        "left among temporary files",
        cache_prune.find_leftovers(Path(tempfile.gettempdir()), temp_files.TEMP_PREFIX),
    )


def find_damaged(folder: Path) -> list[Path]:
    """Return the damaged kernels in a folder."""
    from llamatrain.compiler.cache import describe_code
    from llamatrain.compiler.inventory import list_compilables
    from llamatrain.compiler.store import ObjectStore, object_name

    store = ObjectStore(folder)
    for function in list_compilables():
        store.load(
            object_name(function.qualified_name.replace(":", "."), describe_code(function)),
            describe_code(function),
        )
    return [folder / name for name in sorted(store.damaged)]


def remove_files(name: str, paths: list[Path]) -> Fact:
    """Remove files, and return a fact about them."""
    from llamatrain.platform.temp_files import remove_path

    fact = files_fact(name, paths)
    for path in paths:
        remove_path(path)
    return fact
