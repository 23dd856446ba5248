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
from llamatrain.config.remote_names import remote_name
from llamatrain.data.file_kind import KNOWN, SUPPORTED, check_head, check_name, parse_name
from llamatrain.data.files import DataFile, Format
from llamatrain.data.readers import compressed
from llamatrain.data.readers.compressed import UTF16_MARKS, ZSTD_HINT, can_read_zstd
from llamatrain.data.readers.encoding import check_no_zero_bytes
from llamatrain.data.readers.formats import BINARY, binary_format, guess_format
from llamatrain.data.readers.text import TEXT
from llamatrain.distributed.comm import get_comm
from llamatrain.errors import DataError, MissingError
from llamatrain.platform.temp_files import create_temp_file
from llamatrain.sources.names import locate

HEAD_BYTES = 1 << 16  # enough to see whether a file is text
PIECE = 1 << 20  # bytes read at once
BINARY_MARKS = (*compressed.MAGIC, *(format.magic for format in BINARY), *UTF16_MARKS)
Use = Literal["train", "validate", "judge"]


# ---- folders ---------------------------------------------------------------

SPLIT_WORDS = {
    "train": "train training",
    "validation": "validation valid val dev",
    "test": "test testing eval evaluation",
}
SPLITS = {word: split for split, words in SPLIT_WORDS.items() for word in words.split()}
SPLIT_NAME = re.compile(rf"({'|'.join(sorted(SPLITS, key=len, reverse=True))})(?![a-z])")
METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
ABOUT = re.compile(r"(readme|licen[cs]e|changelog|contributing)\b", re.IGNORECASE)
PREFERRED = (".txt", ".md", ".jsonl", ".ndjson")  # next to these, other formats are ignored


@dataclass(frozen=True)
class ScannedFolder:
    """The files of a folder, sorted by split: training, validation, test, and the rest."""

    path: Path
    train: list[Path]
    held_out: dict[str, list[Path]] = field(default_factory=dict)  # by split
    ignored: list[Path] = field(default_factory=list)

    @property
    def validation_split(self) -> str:
        """The split to validate with if the user names none."""
        return "validation" if "validation" in self.held_out else "test"

    @property
    def evaluation_split(self) -> str:
        """The split to evaluate a trained model with."""
        return "test" if "test" in self.held_out else "validation"


def scan_folder(path: Path) -> ScannedFolder:
    """Scan a folder for data files; sort them by the splits in their names."""
    files = list_files(path)
    rows = [file for file in files if has_rows(file) and file.name not in METADATA]
    splits = {file: split_from_name(file.relative_to(path)) for file in rows}
    held_out: dict[str, list[Path]] = {}
    for file, split in splits.items():
        if split is not None and split != "train":
            held_out.setdefault(split, []).append(file)
    if not held_out:
        return scan_without_splits(path, files, rows)
    train = [file for file in rows if splits[file] == "train"]
    if not train:
        train = [file for file in rows if splits[file] is None]
    used = {*train, *(file for split_files in held_out.values() for file in split_files)}
    return ScannedFolder(path, train, held_out, [file for file in files if file not in used])


def scan_without_splits(path: Path, files: list[Path], rows: list[Path]) -> ScannedFolder:
    """Return all data files of a folder as training files."""
    texts = [file for file in files if format_from_name(file) is TEXT]
    if rows and all(ABOUT.match(file.name) for file in texts):
        texts = []
    known = [*texts, *rows]
    train = sorted([file for file in known if file.suffix.lower() in PREFERRED] or known)
    if not train:
        raise DataError(
            f"{path}: the folder has no usable file (it holds {count_by_suffix(files) or 'nothing'}); "
            f"data files end in {KNOWN}",
            code="no-data",
        )
    text = next((file for file in train if format_from_name(file) is TEXT), None)
    row = next((file for file in train if has_rows(file)), None)
    if text and row:
        row_format = format_from_name(row)
        kind = "JSON lines" if row_format and row_format.name == "lines" else "rows"
        raise DataError(
            f"{path}: the folder mixes text ({text}) and {kind} ({row}); name the files to use",
            code="mixed-data",
        )
    return ScannedFolder(path, train, {}, [file for file in files if file not in train])


def format_from_name(file: Path) -> Format | None:
    """Return the format that a file's name implies."""
    return parse_name(file.name)[0]


def has_rows(file: Path) -> bool:
    """Return True if a file's name implies a format of rows."""
    return format_from_name(file) not in (None, TEXT)


def split_from_name(file: Path) -> str | None:
    """Return the split that the name of a file or its folder implies.

    Examples: train-00000-of-00002.parquet, test.csv, validation/a.jsonl.
    """
    if match := SPLIT_NAME.match(file.name.lower()):
        return SPLITS[match[1]]
    folders = (part.lower() for part in reversed(file.parts[:-1]))
    return next((SPLITS[folder] for folder in folders if folder in SPLITS), None)


def list_files(folder: Path) -> list[Path]:
    """List all files under a folder that are not hidden."""
    paths = sorted(folder.rglob("*"))
    return [path for path in paths if path.is_file() and not is_hidden(path.relative_to(folder))]


def is_hidden(path: Path) -> bool:
    """Return True if the file or a folder above it begins with a dot."""
    return any(part.startswith(".") for part in path.parts)


def count_by_suffix(files: Iterable[Path]) -> str:
    """Count files by suffix: `3 .png, 1 .csv`."""
    suffixes = Counter(path.suffix or path.name for path in files)
    return ", ".join(f"{count} {suffix}" for suffix, count in suffixes.most_common(4))


# ---- files -----------------------------------------------------------------


@dataclass(frozen=True)
class FoundFiles:
    """The files that the user named, and the validation files found in the same folders."""

    sources: list[DataFile]
    validation: list[DataFile]
    messages: list[str]  # about the files that were selected


def find_sources(
    data: Sequence[str], columns: Mapping[str, str] | None = None, use: Use = "train", raw: bool = False
) -> list[DataFile]:
    """Return the files of each name: a file, a folder, a glob, a remote name, or - for standard input."""
    return find_data(data, columns, use, raw).sources


def find_data(
    data: Sequence[str], columns: Mapping[str, str] | None = None, use: Use = "train", raw: bool = False
) -> FoundFiles:
    """Find the files of each name, with validation files from the same folders.

    With `raw`, every file is read as text, whatever its name and content.
    """
    result = FoundFiles([], [], [])
    for name in data:
        local = str(locate(name, "data")) if remote_name(name) else name
        if Path(local).is_dir() and local:
            _add_folder(scan_folder(Path(local)), use, result)
        else:
            result.sources.extend(_expand(local, raw))
    if not result.sources:
        raise DataError(
            f"no data; name files ({KNOWN}), folders, globs, or - for standard input", code="no-data"
        )
    for files in (result.sources, result.validation):
        files[:] = [replace(source, columns=columns or {}) for source in files]
        if raw:
            files[:] = [replace(source, format=TEXT, raw=True) for source in files]
        for source in files:
            _check(source)
    return result


def _add_folder(folder: ScannedFolder, use: Use, result: FoundFiles) -> None:
    """Add the files of a folder to `result`, by what the data is used for."""
    if not folder.held_out:
        result.sources.extend(map(_open_path, folder.train))
        return
    if use != "train":
        split = folder.evaluation_split if use == "judge" else folder.validation_split
        result.sources.extend(map(_open_path, folder.held_out[split]))
        result.messages.append(
            f"{folder.path}: using only its files named {split} ({len(folder.held_out[split])})"
        )
        return
    if not folder.train:
        raise DataError(
            f"{folder.path}: its files are named {' and '.join(sorted(folder.held_out))}, none for training; "
            "name the files to train on",
            code="no-training-files",
        )
    result.sources.extend(map(_open_path, folder.train))
    result.validation.extend(map(_open_path, folder.held_out[folder.validation_split]))
    counts = [f"{len(files)} named {split}" for split, files in folder.held_out.items()]
    result.messages.append(
        f"{folder.path}: training on {len(folder.train)} of its files; never on {', '.join(counts)}"
    )


def _expand(name: str, raw: bool) -> list[DataFile]:
    path = Path(name)
    if not name:  # for example of an unset variable; it would be the current folder
        raise MissingError("no data (got an empty path); name a file or a folder", code="no-data")
    if name == "-":
        check_single_process("standard input")
        return [_standard_input()]
    if path.exists():
        return [_open_path(path, raw)]
    if not glob.has_magic(name):
        raise missing_data(name)
    matches = [Path(match) for match in sorted(glob.glob(name, recursive=True))]  # noqa: PTH207 - pathlib takes no absolute ones
    files = [match for match in matches if match.is_file()]
    if not files:
        raise MissingError(f"{name}: no file matches; check the pattern", code="no-such-file")
    return [_open_path(file, raw) for file in files]


def _open_path(path: Path, raw: bool = False) -> DataFile:
    if not raw:
        check_name(path)
    mode = path.stat().st_mode
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):  # /dev/zero has no end
        raise DataError(f"{path}: this is a device; {SUPPORTED}", code="not-a-file")
    if not stat.S_ISREG(mode):  # a pipe can be read only once
        check_single_process(f"{path}, a pipe,")
        return _spool(path, str(path))
    return _detect(path, str(path))


def check_single_process(name: str) -> None:
    """Raise DataError if several processes would have to share a stream."""
    if (size := get_comm().size) > 1:
        raise DataError(
            f"{name} can be read by only one process (got {size} processes); "
            "name a file that all of them can read",
            code="stream-in-parallel-run",
        )


def skipped_files(data: Sequence[str]) -> str:
    """Count the files in the named folders that are not data."""
    folders = [scan_folder(Path(name)) for name in data if name and Path(name).is_dir()]
    return count_by_suffix(path for folder in folders for path in folder.ignored)


@cache  # standard input can be read only once, but a validation split opens it twice
def _standard_input() -> DataFile:
    return _spool(sys.stdin.buffer, "standard input")


@cache
def _spool(origin: Path | BinaryIO, name: str) -> DataFile:
    """Copy a stream into a temporary file that lives as long as the program."""
    path = create_temp_file()
    with (
        path.open("wb") as spool,
        origin.open("rb") if isinstance(origin, Path) else nullcontext(origin) as stream,
    ):
        is_text = True
        for block in iter(lambda: stream.read(PIECE), b""):
            is_text = is_text and (spool.tell() > 0 or not block.startswith(BINARY_MARKS))
            if is_text:
                check_no_zero_bytes(block, name, spool.tell())  # now: an endless stream may be all zeros
            spool.write(block)
    return _detect(path, name)


def _detect(path: Path, name: str) -> DataFile:
    """Detect the format of a file by its name or its first bytes."""
    format, compression = parse_name(name)
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError:
        return DataFile(path, name, format or TEXT, compression)  # `_check` reports it
    if not (format or compression):
        if binary := binary_format(head):
            return DataFile(path, name, binary)
        compression = next((kind for magic, kind in compressed.MAGIC.items() if head.startswith(magic)), None)
    source = DataFile(path, name, format or TEXT, compression)
    if compression == "zst" and not can_read_zstd():
        raise DataError(
            f"{name}: reading zstd needs a package that is not installed; {ZSTD_HINT}", code="missing-package"
        )
    return source if format else replace(source, format=_detect_by_content(source))


def _detect_by_content(source: DataFile) -> Format:
    """Detect the format of a file by its content. One that begins like a JSON object holds JSON lines."""
    with source.open() as file:
        if binary := binary_format(file.peek(8)):  # type: ignore[attr-defined]
            return binary
        lines = iter(lambda: file.readline(HEAD_BYTES), b"")
        first = next((text for line in lines if (text := line.strip())), b"")
        return guess_format(first, file.readline(HEAD_BYTES) + file.readline(HEAD_BYTES))


def _check(source: DataFile) -> None:
    """Raise DataError if a file is empty or not of its format."""
    try:
        if source.format.check and not source.compression:
            source.format.check(source.path, source.name)
            return
        with source.open() as file:
            head = file.read(HEAD_BYTES)
            is_blank = not head.strip() and not any(
                block.strip() for block in iter(lambda: file.read(PIECE), b"")
            )
    except OSError as error:
        raise DataError(f"{source.name}: {error.strerror}", code="unreadable-file") from None
    if not head:
        raise DataError(f"{source.name}: the file is empty", code="empty-file")
    if is_blank:
        raise DataError(f"{source.name}: the file contains only white space", code="empty-file")
    if source.format.is_text:
        check_head(source.name, head, source.raw or source.kind == "lines")


def check_disjoint(sources: list[DataFile], others: list[DataFile]) -> None:
    """Raise DataError if a file is both training and validation data, also through links."""
    names = {identify(source): source.name for source in sources}
    for other in others:
        if name := names.get(identify(other)):
            same = "" if name == other.name else f" (the same as {name})"
            raise DataError(
                f"{other.name}{same}: is both training and validation data; remove it from one of them",
                code="validation-in-training",
            )


def identify(source: DataFile) -> tuple[int, int]:
    """Return the device and inode of a file, as os.path.samefile compares them."""
    status = source.path.stat()
    return status.st_dev, status.st_ino


def describe_files(sources: Sequence[DataFile]) -> str:
    """Name some files for a message: `a.txt and 3 more`."""
    return sources[0].name + (f" and {len(sources) - 1} more" if len(sources) > 1 else "")


# ---- names from a checkpoint -----------------------------------------------

MAX_EXAMINED = 1 << 18  # files and folders
SYSTEM_FOLDERS = ("/proc", "/sys")
NAME_AGAIN = "to use it, name the data again with --resume"


def check_saved_names(data: Sequence[str]) -> None:
    """Check the data names of a checkpoint from an unknown origin.

    Raise DataError for devices, pipes and system files, which may block or never end, and for huge trees.
    """
    left = MAX_EXAMINED
    for name in data:
        for path in _examined_paths(name):
            left -= 1
            if left < 0:
                raise DataError(
                    f"{name}: more than {MAX_EXAMINED} files and folders to search; {NAME_AGAIN}",
                    code="too-many-files",
                )
            mode = path.stat().st_mode if path.exists() else stat.S_IFREG
            real_path = Path(os.path.realpath(path))
            is_system = any(real_path.is_relative_to(folder) for folder in SYSTEM_FOLDERS)
            if is_system or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise DataError(
                    f"{name}: {path} is a device, a pipe or a system file; {NAME_AGAIN}", code="not-a-file"
                )


def _examined_paths(name: str) -> Iterator[Path]:
    """Yield every path that `find_sources` would examine for a name."""
    path = Path(name)
    if name in ("", "-") or "\0" in name:  # no such file: reported when it is opened
        return
    if path.exists() or not glob.has_magic(name):
        yield path
        for folder, folders, files in os.walk(path):
            yield from (Path(folder) / child for child in folders)
            yield from (Path(folder) / child for child in files if Path(folder, child).is_file())
        return
    yield from map(Path, _glob_steps(name))


def _glob_steps(pattern: str) -> Iterator[str]:
    """Yield the matches of a glob and each folder visited on the way."""
    parent, last = os.path.split(pattern)
    folders = _glob_steps(parent) if parent != pattern and glob.has_magic(parent) else [parent]
    for folder in folders:
        yield folder
        if Path(folder).is_dir():
            prefix = f"{glob.escape(folder)}{os.sep}" if folder else ""
            yield from glob.iglob(f"{prefix}{last}", recursive=True)  # noqa: PTH207 - pathlib takes no absolute ones
