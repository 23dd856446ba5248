"""A folder for a run whose own is no more, or takes no more files."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from tempfile import mkdtemp

from llamatrain.checkpoints.lock import FolderLock, locked
from llamatrain.errors import FileError


def again(folder: Path) -> Iterator[tuple[Path, FolderLock]]:
    """In the old place, where nothing has taken it; else as `instead`."""
    with suppress(OSError, FileError):
        folder.mkdir(parents=True, exist_ok=True)
        lock = locked(folder)
        if not any(folder.iterdir()):
            yield folder, lock
            return
        lock.release()
    yield from instead(folder)


def instead(folder: Path) -> Iterator[tuple[Path, FolderLock]]:
    """Beside it, and last in the folder for temporary files."""
    with suppress(OSError, FileError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = _beside(folder)
        yield beside, locked(beside)
    with suppress(OSError, FileError):
        temporary = Path(mkdtemp(prefix="llamatrain-run-"))
        yield temporary, locked(temporary)


def _beside(folder: Path) -> Path:
    for number in count(2):
        with suppress(FileExistsError):
            path = folder.with_name(f"{folder.name}-{number}")
            path.mkdir()
            return path
    raise AssertionError
