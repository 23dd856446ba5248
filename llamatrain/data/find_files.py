"""Resolves the data names on the command line into a list of files."""

import glob
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import BinaryIO, Literal

from llamatrain.config.not_found import missing_data
from llamatrain.data.file_kind import KNOWN, MARKS, TAKEN, Form, check_head, check_name, check_text, named
from llamatrain.data.files import DataFile
from llamatrain.data.readers import parquet
from llamatrain.data.readers.compressed import NEEDED, WIDE, can_unzstd
from llamatrain.distributed.comm import world
from llamatrain.errors import DataError, MissingError
from llamatrain.platform.temp_files import create_temp_file

# ---- folders ---------------------------------------------------------------------

WORDS = {
    "train": "train training",
    "validation": "validation valid val dev",
    "test": "test testing eval evaluation",
}
SPLITS = {word: split for split, words in WORDS.items() for word in words.split()}
NAME = re.compile(rf"({'|'.join(sorted(SPLITS, key=len, reverse=True))})(?![a-z])")
FACTS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")  # about data, and none
ABOUT = re.compile(r"(readme|licen[cs]e|changelog|contributing)\b", re.IGNORECASE)
OLDER = (".txt", ".md", ".jsonl", ".ndjson")  # beside which others are not looked at


@dataclass(frozen=True)
class ScannedFolder:
    """The files of a folder, sorted by split: training, validation, test, and the rest."""

    path: Path
    train: list[Path]
    held: dict[str, list[Path]] = field(default_factory=dict)  # by what it is for
    others: list[Path] = field(default_factory=list)  # which are no data, or not meant

    @property
    def offered(self) -> str:
        """The split to validate with if the user names none."""
        return "validation" if "validation" in self.held else "test"

    @property
    def judged(self) -> str:
        """The split to evaluate a trained model with."""
        return "test" if "test" in self.held else "validation"


def looked_into(path: Path) -> ScannedFolder:
    """Scan a folder for data files; sort them by the splits in their names."""
    files = files_in(path)
    rows = [file for file in files if form_of(file) not in (None, "text") and file.name not in FACTS]
    splits = {file: split_of(file.relative_to(path)) for file in rows}
    held: dict[str, list[Path]] = {}
    for file, split in splits.items():
        if split not in (None, "train"):
            held.setdefault(str(split), []).append(file)
    if not held:
        return without_splits(path, files, rows)
    train = [file for file in rows if splits[file] == "train"] or [
        file for file in rows if splits[file] is None
    ]
    taken = {*train, *(file for some in held.values() for file in some)}
    return ScannedFolder(path, train, held, [file for file in files if file not in taken])


def without_splits(path: Path, files: list[Path], rows: list[Path]) -> ScannedFolder:
    """Return all data files of a folder as training files."""
    texts = [file for file in files if form_of(file) == "text"]
    if rows and all(ABOUT.match(file.name) for file in texts):
        texts = []
    known = [*texts, *rows]
    train = sorted([file for file in known if file.suffix.lower() in OLDER] or known)
    if not train:
        raise DataError(
            f"{path}: no usable file in this folder; it holds {counted(files) or 'nothing'}, and known are {KNOWN}"
        )
    first = {"text" if form_of(file) == "text" else "rows": file for file in reversed(train)}
    if len(first) > 1:
        what = "JSON lines" if form_of(first["rows"]) == "lines" else "rows"
        raise DataError(
            f"{path}: mixes text ({first['text']}) and {what} ({first['rows']}); name the ones meant"
        )
    return ScannedFolder(path, train, {}, [file for file in files if file not in train])


def form_of(file: Path) -> Form | None:
    """Return the format that a file's name implies."""
    return named(file.name)[0]


def split_of(file: Path) -> str | None:
    """Return the split that the name of a file or its folder implies.

    Examples: train-00000-of-00002.parquet, test.csv, validation/a.jsonl.
    """
    if found := NAME.match(file.name.lower()):
        return SPLITS[found[1]]
    return next((SPLITS[part.lower()] for part in reversed(file.parts[:-1]) if part.lower() in SPLITS), None)


def files_in(folder: Path) -> list[Path]:
    """List all files under a folder that are not hidden."""
    return [
        path for path in sorted(folder.rglob("*")) if path.is_file() and not hidden(path.relative_to(folder))
    ]


def hidden(path: Path) -> bool:
    """Return True if the file or a folder above it begins with a dot."""
    return any(part.startswith(".") for part in path.parts)


def counted(files: Iterable[Path]) -> str:
    """Count files by suffix: `3 .png, 1 .csv`."""
    endings = Counter(path.suffix or path.name for path in files)
    return ", ".join(f"{count} {ending}" for ending, count in endings.most_common(4))


# ---- files -----------------------------------------------------------------------

HEAD = 1 << 16  # bytes that show whether a file is text at all
MOST_LOOKED_AT = 1 << 18  # files and folders, for names that a checkpoint alone gives
SYSTEM = ("/proc", "/sys")  # whose files are none
PIECE = 1 << 20  # bytes of what is read to its end
MAGIC: dict[bytes, Literal["gz", "zst", "parquet"]] = {**MARKS, parquet.ENDS: "parquet"}
OBJECT = re.compile(rb'\{\s*"')
ARRAY = re.compile(rb'\[\s*\{\s*"')
Use = Literal["train", "validate", "judge"]


@dataclass(frozen=True)
class FoundFiles:
    """The files that the user named, and the validation files found in the same folders."""

    sources: list[DataFile]
    offered: list[DataFile]  # to validate with
    told: list[str]  # what is to be said of it


def find_sources(
    data: Sequence[str], columns: Mapping[str, str] | None = None, use: Use = "train", raw: bool = False
) -> list[DataFile]:
    """Return the files of each name: a file, a folder, a glob, or - for standard input."""
    return find_data(data, columns, use, raw).sources


def find_data(
    data: Sequence[str], columns: Mapping[str, str] | None = None, use: Use = "train", raw: bool = False
) -> FoundFiles:
    """Find the files of each name, with validation files from the same folders.

    With `raw`, every file is read as text, whatever its name and content.
    """
    found = FoundFiles([], [], [])
    for name in data:
        if Path(name).is_dir() and name:
            _folder(looked_into(Path(name)), use, found)
        else:
            found.sources.extend(_expand(name, raw))
    if not found.sources:
        raise DataError(f"no data: name files ({KNOWN}), folders, globs, or - for standard input")
    for files in (found.sources, found.offered):
        files[:] = [replace(source, columns=columns or {}) for source in files]
        if raw:
            files[:] = [replace(source, form="text", raw=True) for source in files]
        for source in files:
            _check(source)
    return found


def _folder(folder: ScannedFolder, use: Use, found: FoundFiles) -> None:
    """Add the files of a folder to `found`, by what the data is used for."""
    if not folder.held:
        found.sources.extend(map(_file, folder.train))
        return
    if use != "train":
        split = folder.judged if use == "judge" else folder.offered
        found.sources.extend(map(_file, folder.held[split]))
        found.told.append(
            f"{folder.path}: of its files those named {split} are taken ({len(folder.held[split])})"
        )
        return
    if not folder.train:
        raise DataError(
            f"{folder.path}: its files are named {' and '.join(sorted(folder.held))}, and none for training; name the files meant"
        )
    found.sources.extend(map(_file, folder.train))
    found.offered.extend(map(_file, folder.held[folder.offered]))
    kept = [f"{len(files)} named {split}" for split, files in folder.held.items()]
    found.told.append(
        f"{folder.path}: {len(folder.train)} of its files train; never trained on: {', '.join(kept)}"
    )


def _expand(name: str, raw: bool) -> list[DataFile]:
    path = Path(name)
    if not name:  # as of a variable that is not set: it would be the current folder
        raise MissingError("no data: an empty path")
    if name == "-":
        check_alone("standard input")
        return [_standard_input()]
    if path.exists():
        return [_file(path, raw)]
    if not glob.has_magic(name):
        raise missing_data(name)
    matched = [Path(match) for match in sorted(glob.glob(name, recursive=True))]  # noqa: PTH207 - pathlib takes no absolute ones
    if not any(match.is_file() for match in matched):
        raise MissingError(f"{name}: no file matches")
    return [_file(match, raw) for match in matched if match.is_file()]


def _file(path: Path, raw: bool = False) -> DataFile:
    if not raw:
        check_name(path)
    mode = path.stat().st_mode
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):  # /dev/zero has no end
        raise DataError(f"{path}: this is a device; {TAKEN}")
    if not stat.S_ISREG(mode):  # a pipe can be read once only
        check_alone(f"{path}, a pipe,")
        return _spooled(path, str(path))
    return _known(path, str(path))


def check_alone(name: str) -> None:
    """Raise DataError if several processes would have to share a stream."""
    if (size := world().size) > 1:
        raise DataError(
            f"{name} comes to one process, and {size} take the data; name a file that all of them can read"
        )


def passed_over(data: Sequence[str]) -> str:
    """Count the files in the named folders that are not data."""
    folders = [looked_into(Path(name)) for name in data if name and Path(name).is_dir()]
    return counted(path for folder in folders for path in folder.others)


@cache  # standard input can be read once only, and a split asks twice
def _standard_input() -> DataFile:
    return _spooled(sys.stdin.buffer, "standard input")


@cache
def _spooled(origin: Path | BinaryIO, name: str) -> DataFile:
    """Copy a stream into a temporary file that lives as long as the program."""
    path = create_temp_file()
    with (
        path.open("wb") as spool,
        origin.open("rb") if isinstance(origin, Path) else nullcontext(origin) as stream,
    ):
        text = True
        for block in iter(lambda: stream.read(PIECE), b""):
            text = text and (spool.tell() > 0 or not block.startswith((*MAGIC, *WIDE)))
            if text:
                check_text(block, name, spool.tell())  # here, since what goes on for ever may be zeros
            spool.write(block)
    return _known(path, name)


def _known(path: Path, name: str) -> DataFile:
    """Detect the format of a file by its name or its first bytes."""
    form, packed = named(name)
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError:
        return DataFile(path, name, form or "text", packed)  # which is checked, and refused, like any other
    if not (form or packed):
        magic = next((found for mark, found in MAGIC.items() if head.startswith(mark)), None)
        if magic == "parquet":
            return DataFile(path, name, "parquet")
        packed = magic
    source = DataFile(path, name, form or "text", packed)
    _check_packed(source)
    return source if form else replace(source, form=_look(source))


def _look(source: DataFile) -> Form:
    """Detect the format of a file by its content. One that begins like a JSON object holds JSON lines."""
    with source.opened() as file:
        if file.peek(4).startswith(parquet.ENDS):  # type: ignore[attr-defined]
            return "parquet"
        lines = iter(lambda: file.readline(HEAD), b"")
        first = next((text for line in lines if (text := line.strip())), b"")
        more = first + file.readline(HEAD) + file.readline(HEAD)
    return "lines" if OBJECT.match(first) else "json" if ARRAY.match(more) else "text"


def _check_packed(source: DataFile) -> None:
    if source.packed == "zst" and not can_unzstd():
        raise DataError(f"{source.name}: {NEEDED}; or unpack it first")


# ---- names that nobody typed -------------------------------------------------


def check_kept(data: Sequence[str]) -> None:
    """Check the data names of a checkpoint from an unknown origin.

    Raise DataError for devices, pipes and system files, which may block or never end, and for huge trees.
    """
    left = MOST_LOOKED_AT
    for name in data:
        for path in _looked_at(name):
            if (left := left - 1) < 0:
                raise DataError(
                    f"{name}: more than {MOST_LOOKED_AT} files and folders to look through; {ANEW}"
                )
            mode = path.stat().st_mode if path.exists() else stat.S_IFREG
            system = any(Path(os.path.realpath(path)).is_relative_to(each) for each in SYSTEM)
            if system or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise DataError(f"{name}: {path} is a device, a pipe or a file of the system; {ANEW}")


ANEW = "where it is meant, name the data again beside --resume"


def _looked_at(name: str) -> Iterator[Path]:
    """Yield every path that `find_sources` would examine for a name."""
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
    """Yield the matches of a glob and each folder visited on the way."""
    folder, last = os.path.split(pattern)
    folders = _matched(folder) if folder != pattern and glob.has_magic(folder) else [folder]
    for each in folders:
        yield each
        if Path(each).is_dir():
            place = f"{glob.escape(each)}{os.sep}" if each else ""
            yield from glob.iglob(f"{place}{last}", recursive=True)  # noqa: PTH207 - pathlib takes no absolute ones


def check_apart(sources: list[DataFile], others: list[DataFile]) -> None:
    """Raise DataError if a file is both training and validation data, also through links."""
    known = {identity(source): source.name for source in sources}
    for other in others:
        if name := known.get(identity(other)):
            also = "" if name == other.name else f" (the same as {name})"
            raise DataError(
                f"{other.name}{also}: is both training and validation data; what validates is never trained on"
            )


def identity(source: DataFile) -> tuple[int, int]:
    """Return the device and inode of a file, as os.path.samefile compares them."""
    status = source.path.stat()
    return status.st_dev, status.st_ino


def naming(sources: Sequence[DataFile]) -> str:
    """Name some files for a message: `a.txt and 3 more`."""
    return sources[0].name + (f" and {len(sources) - 1} more" if len(sources) > 1 else "")


def _check(source: DataFile) -> None:
    try:
        if source.form == "parquet" and not source.packed:
            parquet.check(source.path, source.name)
            return
        with source.opened() as file:
            head = file.read(HEAD)
            blank = not head.strip() and not any(
                block.strip() for block in iter(lambda: file.read(PIECE), b"")
            )
    except OSError as error:
        raise DataError(f"{source.name}: {error.strerror}") from None
    if not head:
        raise DataError(f"{source.name}: the file is empty")
    if blank:
        raise DataError(f"{source.name}: there is only white space in it")
    if source.form != "parquet":
        check_head(source.name, head, source.raw or source.form != "text")
