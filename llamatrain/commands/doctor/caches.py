"""What lies in the caches and among the temporary files, and what of it can go."""

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from llamatrain.commands.doctor.problems import Fact, Problem, Told, fact, of_bytes, size


def place() -> Path | None:
    from llamatrain.platform.cache_dir import wanted

    found = wanted("tokens")
    return found.parent if found else None


def caches() -> Told:
    from llamatrain.platform.cache_dir import SWITCH, hindrance

    root = place()
    yield fact("folder", None if root is None else str(root))
    if root is None:
        yield Problem("there is no home to keep kernels and tokens in", f"{SWITCH} names a folder for them")
    elif trouble := hindrance(root):
        yield Problem(trouble, f"{SWITCH} names another folder")
    if root is not None:
        with suppress(OSError):
            yield of_bytes("room", shutil.disk_usage(root).free)
        yield from lying(root)
    yield from passing()


def lying(root: Path) -> Told:
    from llamatrain.compiler.cache import cache_key
    from llamatrain.platform import cache_prune, temp_files

    folders, entries = cache_prune.kernels(root), cache_prune.tokens(root)
    own = [each for each in folders if each.path.name == cache_key()]
    old = [each for each in folders if each not in own]
    days, most = cache_prune.UNUSED // temp_files.DAY, size(cache_prune.MOST)
    yield counted("kernels", own)
    yield counted("kernels of other versions", old, f"; they go {days} days after they were last used")
    yield counted("tokens", entries, f"; they go {days} days after they were last used, or beyond {most}")
    known = {cache_prune.TOKENS, cache_prune.STAMP, *(each.path.name for each in folders)}
    with suppress(OSError):
        for path in sorted(root.iterdir()):
            if path.name not in known and not path.name.startswith(temp_files.NEW):
                yield of_bytes(path.name, cache_prune.size_of(path))
    yield left_behind("left by dead processes", cache_prune.lefts(root))


def counted(name: str, folders: list[Any], more: str = "") -> Fact:
    nbytes = sum(each.nbytes for each in folders)
    return Fact(
        name,
        {"folders": len(folders), "bytes": nbytes},
        f"{size(nbytes)} in {in_number(folders, 'folder')}{more if folders else ''}",
    )


def left_behind(name: str, paths: list[Path]) -> Fact:
    from llamatrain.platform.cache_prune import size_of

    nbytes = sum(map(size_of, paths))
    return Fact(
        name,
        {"files": len(paths), "bytes": nbytes},
        f"{size(nbytes)} in {in_number(paths, 'file')}" if paths else "nothing",
    )


def in_number(things: list[Any], name: str) -> str:
    return f"{len(things)} {name}{'s' * (len(things) != 1)}"


def passing() -> Told:
    from llamatrain.platform.cache_prune import left
    from llamatrain.platform.temp_files import PASSING

    try:
        folder = Path(tempfile.gettempdir())
    except OSError as error:
        yield Problem(f"there is no folder for temporary files: {error.strerror}", "TMPDIR names one")
        return
    yield fact("temporary files", str(folder))
    yield left_behind("left there by dead processes", left(folder, PASSING))


def cleaned() -> Told:
    """Old kernels and all tokens that nobody reads, what dead processes left, and what is damaged."""
    from llamatrain.compiler.cache import cache_key
    from llamatrain.platform import cache_prune, temp_files

    if root := place():
        own = root / cache_key()
        yield counted(
            "old kernels", cache_prune.remove(each for each in cache_prune.kernels(root) if each.path != own)
        )
        yield counted("tokens", cache_prune.remove(cache_prune.tokens(root)))
        yield swept("damaged kernels", broken(own))
        yield swept("left by dead processes", cache_prune.lefts(root))
    yield swept(
        "left among temporary files", cache_prune.left(Path(tempfile.gettempdir()), temp_files.PASSING)
    )


def broken(folder: Path) -> list[Path]:
    from llamatrain.compiler.cache import facts_of
    from llamatrain.compiler.inventory import declared
    from llamatrain.compiler.store import ObjectStore, name_of

    shelf = ObjectStore(folder)
    for each in declared():
        shelf.take(name_of(each.where.replace(":", "."), facts_of(each)), facts_of(each))
    return [folder / name for name in sorted(shelf.damaged)]


def swept(name: str, paths: list[Path]) -> Fact:
    from llamatrain.platform.temp_files import removed

    told = left_behind(name, paths)
    for path in paths:
        removed(path)
    return told
