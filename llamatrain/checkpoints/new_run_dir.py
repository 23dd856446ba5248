"""Creates folders for runs, and replacements for a folder that disappeared or cannot be written."""

import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from tempfile import mkdtemp

from llamatrain.checkpoints.lock import FolderLock, lock_folder
from llamatrain.errors import FileError, wrap_os_errors


def missing_parents(path: Path) -> list[Path]:
    """Return the parents of a path that do not exist yet, innermost first."""
    with suppress(OSError):
        return [parent for parent in path.parents if not parent.exists()]
    return []


def ensure_folder(path: Path) -> bool:
    """Create a folder if it is missing; return True if it was created."""
    with wrap_os_errors(path, "the folder cannot be created"):
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not path.is_dir():
                raise
            return False
    return True


def create_next_folder(runs: Path, command: str) -> Path:
    """Create the folder `<command>-<n>` with the next free number."""
    name = re.compile(re.escape(command) + r"-([0-9]{1,18})")
    with wrap_os_errors(runs, "no folder can be created in it"):
        runs.mkdir(parents=True, exist_ok=True)
        used = [int(match[1]) for entry in runs.iterdir() if (match := name.fullmatch(entry.name))]
        for number in count(max(used, default=0) + 1):
            with suppress(FileExistsError):
                path = runs / f"{command}-{number}"
                # parents: a rejected run next to this one may have removed the folder
                path.mkdir(parents=True)
                return path
    raise AssertionError


# ---- a folder in place of a lost one ----------------------------------------


def recreate_folder(folder: Path) -> Iterator[tuple[Path, FolderLock]]:
    """Yield the folder at its old path if that is free, then the fallbacks; each is locked."""
    with suppress(OSError, FileError):
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(folder)
        if not any(folder.iterdir()):
            yield folder, lock
            return
        lock.release()
    yield from fallback_folders(folder)


def fallback_folders(folder: Path) -> Iterator[tuple[Path, FolderLock]]:
    """Yield a sibling of the folder, then a folder for temporary files; each is locked."""
    with suppress(OSError, FileError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        sibling = _create_sibling(folder)
        yield sibling, lock_folder(sibling)
    with suppress(OSError, FileError):
        temporary = Path(mkdtemp(prefix="llamatrain-run-"))
        yield temporary, lock_folder(temporary)


def _create_sibling(folder: Path) -> Path:
    for number in count(2):
        with suppress(FileExistsError):
            path = folder.with_name(f"{folder.name}-{number}")
            path.mkdir()
            return path
    raise AssertionError
