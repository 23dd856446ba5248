"""What the user names as data, as a list of files: text, or JSON lines."""

import glob
import os
import stat
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO, Literal

from llamatrain.data.suitable import KINDS, KNOWN, MARK, TAKEN, check_head, check_name, check_text
from llamatrain.errors import DataError
from llamatrain.machine.temporary import passing_file

HEAD = 1 << 16  # bytes that show whether a file is text at all
MOST_LOOKED_AT = 1 << 18  # files and folders, for names that a checkpoint alone gives
SYSTEM = ("/proc", "/sys")  # whose files are none
PIECE = 1 << 20  # bytes of what is read to its end


@dataclass(frozen=True)
class DataFile:
    path: Path
    name: str  # as the user knows it
    kind: Literal["text", "lines"]


def find_sources(data: Sequence[str]) -> list[DataFile]:
    """Files for each name given: a file, a folder (everything known under it), a glob, or - for standard input."""
    found = [source for name in data for source in _expand(name)]
    if not found:
        raise DataError(f"no data: name files ({KNOWN}), folders, globs, or - for standard input")
    for source in found:
        _check(source)
    return found


def _expand(name: str) -> list[DataFile]:
    path = Path(name)
    if not name:  # as of a variable that is not set: it would be the current folder
        raise DataError("no data: an empty path")
    if name == "-":
        return [_standard_input()]
    if path.is_dir():
        return _folder(path)
    if path.exists():
        return [_file(path)]
    if not glob.has_magic(name):
        raise DataError(f"{name}: no such file or folder")
    matched = [Path(match) for match in sorted(glob.glob(name, recursive=True))]  # noqa: PTH207 - pathlib takes no absolute ones
    if not any(match.is_file() for match in matched):
        raise DataError(f"{name}: no file matches")
    return [_file(match) for match in matched if match.is_file()]


def _file(path: Path) -> DataFile:
    check_name(path)
    mode = path.stat().st_mode
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):  # /dev/zero has no end
        raise DataError(f"{path}: this is a device; {TAKEN}")
    if not stat.S_ISREG(mode):  # a pipe can be read once only
        return _spooled(path, str(path))
    return DataFile(path, str(path), KINDS.get(path.suffix.lower()) or _look(path))


def _folder(folder: Path) -> list[DataFile]:
    files = _files(folder)
    sources = [_file(path) for path in files if path.suffix.lower() in KINDS]
    if not sources:
        raise DataError(
            f"{folder}: no usable file in this folder; it holds {_counted(files) or 'nothing'}, and known are {KNOWN}"
        )
    first = {source.kind: source.name for source in reversed(sources)}
    if len(first) > 1:
        raise DataError(f"{folder}: mixes text ({first['text']}) and JSON lines ({first['lines']}); name the ones meant")
    return sources


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and not _hidden(path.relative_to(folder))]


def _counted(files: Iterable[Path]) -> str:
    """`3 .png, 1 .csv`."""
    endings = Counter(path.suffix or path.name for path in files)
    return ", ".join(f"{count} {ending}" for ending, count in endings.most_common(4))


def passed_over(data: Sequence[str]) -> str:
    """What the folders among the names given hold besides data."""
    folders = [Path(name) for name in data if Path(name).is_dir()]
    return _counted(path for folder in folders for path in _files(folder) if path.suffix.lower() not in KINDS)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


@cache  # standard input can be read once only, and a split asks twice
def _standard_input() -> DataFile:
    return _spooled(sys.stdin.buffer, "standard input")


@cache
def _spooled(origin: Path | BinaryIO, name: str) -> DataFile:
    """What a stream holds, in a file of its own for as long as the program runs."""
    path = passing_file()
    with (
        path.open("wb") as spool,
        origin.open("rb") if isinstance(origin, Path) else nullcontext(origin) as stream,
    ):
        for block in iter(lambda: stream.read(PIECE), b""):
            check_text(block, name, spool.tell())  # here, since what goes on for ever may be zeros
            spool.write(block)
    return DataFile(path, name, _look(path))


def _look(path: Path) -> Literal["text", "lines"]:
    """What a file is whose name does not say: one whose first line looks like a JSON object is meant to hold such lines."""
    try:
        with path.open("rb") as file:
            lines = iter(lambda: file.readline(HEAD), b"")
            first = next((text for line in lines if (text := line.removeprefix(MARK).strip())), b"")
    except OSError:
        return "text"  # which is checked, and refused, like any other
    return "lines" if first.startswith(b"{") and first[1:].lstrip()[:1] == b'"' else "text"


# ---- names that nobody typed -------------------------------------------------


def check_kept(data: Sequence[str]) -> None:
    """Of a run that may come from anywhere: its names bring about nothing that waits, has no end, or is half the disk."""
    left = MOST_LOOKED_AT
    for name in data:
        for path in _looked_at(name):
            if (left := left - 1) < 0:
                raise DataError(f"{name}: more than {MOST_LOOKED_AT} files and folders to look through; {ANEW}")
            mode = path.stat().st_mode if path.exists() else stat.S_IFREG
            system = any(Path(os.path.realpath(path)).is_relative_to(each) for each in SYSTEM)
            if system or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise DataError(f"{name}: {path} is a device, a pipe or a file of the system; {ANEW}")


ANEW = "where it is meant, name the data again beside --resume"


def _looked_at(name: str) -> Iterator[Path]:
    """What a name has to be looked through for, one after the other: as much as `find_sources` would."""
    path = Path(name)
    if name in ("", "-") or "\0" in name:  # of which no file is called so: that is said where it is opened
        return
    if path.exists() or not glob.has_magic(name):
        yield path
        for folder, folders, files in os.walk(path):
            yield from (Path(folder) / each for each in folders)
            yield from (Path(folder) / each for each in files if Path(folder, each).is_file())
        return
    yield from map(Path, _matched(name))


def _matched(pattern: str) -> Iterator[str]:
    """As glob does, but that each folder on the way there counts."""
    folder, last = os.path.split(pattern)
    folders = _matched(folder) if folder != pattern and glob.has_magic(folder) else [folder]
    for each in folders:
        yield each
        if Path(each).is_dir():
            place = f"{glob.escape(each)}{os.sep}" if each else ""
            yield from glob.iglob(f"{place}{last}", recursive=True)  # noqa: PTH207 - pathlib takes no absolute ones


def check_apart(sources: list[DataFile], others: list[DataFile]) -> None:
    """No file is named as both, by whatever link."""
    known = {identity(source): source.name for source in sources}
    for other in others:
        if name := known.get(identity(other)):
            also = "" if name == other.name else f" (the same as {name})"
            raise DataError(f"{other.name}{also}: is both training and validation data; what validates is never trained on")


def identity(source: DataFile) -> tuple[int, int]:
    """What os.path.samefile compares, for many files."""
    status = source.path.stat()
    return status.st_dev, status.st_ino


def naming(sources: Sequence[DataFile]) -> str:
    """`a.txt and 3 more`."""
    return sources[0].name + (f" and {len(sources) - 1} more" if len(sources) > 1 else "")


def _check(source: DataFile) -> None:
    try:
        with source.path.open("rb") as file:
            head = file.read(HEAD)
            blank = not head.strip() and not any(block.strip() for block in iter(lambda: file.read(PIECE), b""))
    except OSError as error:
        raise DataError(f"{source.name}: {error.strerror}") from None
    if not head.removeprefix(MARK):
        raise DataError(f"{source.name}: the file is empty")
    if blank:
        raise DataError(f"{source.name}: there is only white space in it")
    check_head(source.name, Path(source.name).suffix, head)
