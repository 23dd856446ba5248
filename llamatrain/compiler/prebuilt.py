"""The prebuilt kernel libraries in the package, one for each processor class, and their verification.

`manifest.json` has a hash of the sources they were built from, and the sha256 of each. It detects damage and
edited sources. Against malice, nothing is loaded from where others can write.
"""

import hashlib
import json
import os
import stat
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from llamatrain.compiler.loader import load_code, load_file
from llamatrain.platform.cpu import processor
from llamatrain.platform.files import read_regular
from llamatrain.platform.systems import library_suffix

PACKAGE = Path(__file__).resolve().parent.parent
LIBRARIES_VARIABLE = "LLAMATRAIN_LIBRARIES"  # names another folder of libraries, or an empty one
FOLDER = Path(os.environ.get(LIBRARIES_VARIABLE) or PACKAGE / "compiler" / "libraries")
MANIFEST, MAX_BYTES = "manifest.json", 1 << 26
HASHED_FOLDERS = (
    "compiler",
    "platform",
    "kernels",
    "gguf/quants",
    "data/tokenizer",
)  # the folders whose sources end up in machine code


@cache
def hash_sources() -> str:
    """Return a hash of all sources that end up in machine code."""
    key = hashlib.sha256()
    torch = PACKAGE / "kernels" / "torch"  # no machine code is made of it
    sources = (path for folder in HASHED_FOLDERS for path in (PACKAGE / folder).rglob("*.py"))
    for source in sorted(path for path in sources if torch not in path.parents):
        key.update(source.relative_to(PACKAGE).as_posix().encode() + b"\0" + source.read_bytes() + b"\0")
    return key.hexdigest()


def library_filename(name: str, system: str = sys.platform) -> str:
    """Return the filename of a class's library on an operating system, by default this one."""
    return f"{name}{library_suffix(system)}"


def find_nothing(symbol: str) -> int:
    """Return 0: the lookup without a library."""
    return 0


def open_library() -> tuple[Callable[[str], int], str]:
    """Return the lookup of this machine's kernels, and why there are none although there should be."""
    name, manifest = processor().name, FOLDER / MANIFEST
    try:
        contents = json.loads(read_regular(manifest, MAX_BYTES)[0])
        built_from, expected = contents["sources"], contents["libraries"].get(name)
    except (FileNotFoundError, NotADirectoryError):  # the package has no libraries
        return find_nothing, ""
    except OSError as error:
        return find_nothing, f"{manifest} cannot be read ({error.strerror or error})"
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RecursionError,
    ):  # not a manifest
        return find_nothing, f"{manifest} is damaged"
    if expected is None:
        return find_nothing, ""
    if built_from != hash_sources():
        return find_nothing, "the kernels that came with the package are of other sources than these"
    return _load_verified(FOLDER / library_filename(name), expected)


def _load_verified(path: Path, expected: Any) -> tuple[Callable[[str], int], str]:
    if problem := next(
        filter(None, map(find_untrusted_writer, _paths_and_parents(FOLDER / MANIFEST, path))), ""
    ):
        return find_nothing, f"the kernels that came with the package are passed over: {problem}"
    try:
        code = read_regular(path, MAX_BYTES)[0]
        if hashlib.sha256(code).hexdigest() != expected:
            return find_nothing, f"{path} is not what came with the package"
        from_memory = sys.platform == "linux"  # others load the file where it is
        return load_code(code, exported=path.stem) if from_memory else load_file(path), ""
    except OSError as error:
        return find_nothing, f"{path} cannot be loaded ({error.strerror or error})"


def _paths_and_parents(*files: Path) -> dict[Path, None]:
    """Return the files and two folders above each, with links resolved."""
    real = [Path(os.path.realpath(file)) for file in files]
    return dict.fromkeys(place for file in real for place in (file, *file.parents[:2]))


def find_untrusted_writer(path: Path) -> str:
    """Return who besides the user and root can write to a path, or an empty string."""
    if not hasattr(os, "geteuid"):
        return ""
    try:
        status = path.stat()
    except OSError as error:
        return f"{path} cannot be read ({error.strerror or error})"
    if status.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to another user"
    if status.st_mode & stat.S_IWOTH or (
        status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid)
    ):
        return f"others can write to {path}"
    return ""


def _is_private_group(group: int) -> bool:
    """Return True for root's group, and for a group that only this user is in."""
    if group == 0:
        return True
    if sys.platform == "win32":
        return False
    else:
        import grp
        import pwd

        try:
            user = pwd.getpwuid(os.geteuid())
            entry = grp.getgrgid(group)
        except KeyError:
            return False
        return group == user.pw_gid and entry.gr_name == user.pw_name and set(entry.gr_mem) <= {user.pw_name}
