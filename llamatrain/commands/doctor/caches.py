"""What lies in the caches and among the temporary files, and what of it can go."""

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from llamatrain.commands.doctor.problems import Fact, Problem, Told, fact, of_bytes, size


def place() -> Path | None:
    from llamatrain.platform.cache_dir import default_cache_dir

    found = default_cache_dir("tokens")
    return found.parent if found else None


def caches() -> Told:
    from llamatrain.platform.cache_dir import CACHE_VARIABLE, find_write_problem

    root = place()
    yield fact("folder", None if root is None else str(root))
    if root is None:
        yield Problem(
            "there is no home to keep kernels and tokens in", f"{CACHE_VARIABLE} names a folder for them"
        )
    elif trouble := find_write_problem(root):
        yield Problem(trouble, f"{CACHE_VARIABLE} names another folder")
    if root is not None:
        with suppress(OSError):
            yield of_bytes("room", shutil.disk_usage(root).free)
        yield from lying(root)
    yield from passing()


def lying(root: Path) -> Told:
    from llamatrain.compiler.cache import cache_key
    from llamatrain.platform import cache_prune, temp_files

    folders, entries = cache_prune.list_kernels(root), cache_prune.list_tokens(root)
    own = [each for each in folders if each.path.name == cache_key()]
    old = [each for each in folders if each not in own]
    days, most = cache_prune.MAX_AGE // temp_files.DAY, size(cache_prune.MAX_TOKEN_BYTES)
    yield counted("kernels", own)
    yield counted("kernels of other versions", old, f"; they go {days} days after they were last used")
    yield counted("tokens", entries, f"; they go {days} days after they were last used, or beyond {most}")
    known = {cache_prune.TOKEN_FOLDER, cache_prune.STAMP, *(each.path.name for each in folders)}
    with suppress(OSError):
        for path in sorted(root.iterdir()):
            if path.name not in known and not path.name.startswith(temp_files.NEW_PREFIX):
                yield of_bytes(path.name, cache_prune.disk_usage(path))
    yield left_behind("left by dead processes", cache_prune.find_all_leftovers(root))


def counted(name: str, folders: list[Any], more: str = "") -> Fact:
    nbytes = sum(each.nbytes for each in folders)
    return Fact(
        name,
        {"folders": len(folders), "bytes": nbytes},
        f"{size(nbytes)} in {in_number(folders, 'folder')}{more if folders else ''}",
    )


def left_behind(name: str, paths: list[Path]) -> Fact:
    from llamatrain.platform.cache_prune import disk_usage

    nbytes = sum(map(disk_usage, paths))
    return Fact(
        name,
        {"files": len(paths), "bytes": nbytes},
        f"{size(nbytes)} in {in_number(paths, 'file')}" if paths else "nothing",
    )


def in_number(things: list[Any], name: str) -> str:
    return f"{len(things)} {name}{'s' * (len(things) != 1)}"


def passing() -> Told:
    from llamatrain.platform.cache_prune import find_leftovers
    from llamatrain.platform.temp_files import TEMP_PREFIX

    try:
        folder = Path(tempfile.gettempdir())
    except OSError as error:
        yield Problem(f"there is no folder for temporary files: {error.strerror}", "TMPDIR names one")
        return
    yield fact("temporary files", str(folder))
    yield left_behind("left there by dead processes", find_leftovers(folder, TEMP_PREFIX))


def cleaned() -> Told:
    """Old kernels and all tokens that nobody reads, what dead processes left, and what is damaged."""
    from llamatrain.compiler.cache import cache_key
    from llamatrain.platform import cache_prune, temp_files

    if root := place():
        own = root / cache_key()
        yield counted(
            "old kernels",
            cache_prune.remove(each for each in cache_prune.list_kernels(root) if each.path != own),
        )
        yield counted("tokens", cache_prune.remove(cache_prune.list_tokens(root)))
        yield swept("damaged kernels", broken(own))
        yield swept("left by dead processes", cache_prune.find_all_leftovers(root))
    yield swept(
        "left among temporary files",
        cache_prune.find_leftovers(Path(tempfile.gettempdir()), temp_files.TEMP_PREFIX),
    )


def broken(folder: Path) -> list[Path]:
    from llamatrain.compiler.cache import describe_code
    from llamatrain.compiler.inventory import list_compilables
    from llamatrain.compiler.store import ObjectStore, object_name

    shelf = ObjectStore(folder)
    for each in list_compilables():
        shelf.load(
            object_name(each.qualified_name.replace(":", "."), describe_code(each)), describe_code(each)
        )
    return [folder / name for name in sorted(shelf.damaged)]


def swept(name: str, paths: list[Path]) -> Fact:
    from llamatrain.platform.temp_files import remove_path

    told = left_behind(name, paths)
    for path in paths:
        remove_path(path)
    return told
