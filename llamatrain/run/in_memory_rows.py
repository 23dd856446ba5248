"""Passes rows from the memory of a Python program: they are written as JSON lines, and read like any other file.

The rows of a run lie in its own folder, so that it can be resumed. The file is named by a hash of its
content: the same rows are the same file, and those of another run in the same folder stay as they are.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from llamatrain.checkpoints.filenames import run_files
from llamatrain.checkpoints.new_run_dir import create_next_folder, ensure_folder, missing_parents
from llamatrain.checkpoints.run_folder import RUNS
from llamatrain.config.messages import quote
from llamatrain.config.values import is_valid_path
from llamatrain.distributed.launcher import check_single_process
from llamatrain.errors import UsageError
from llamatrain.io.atomic_write import AtomicFile
from llamatrain.platform.temp_files import create_temp_folder, remove_path

Place = str | os.PathLike[str]
Row = Mapping[str, Any]
Data = Place | Iterable[Place] | Iterable[Row]
ROW_OPTIONS = ("val", "retain_data")  # options that take rows as well
NAME = re.compile(r"(?:data|val|retain_data)-[0-9a-f]{12}\.jsonl")
TAKES = "give a path, a list of paths, or a list of rows (dicts)"


def split_data(data: Sequence[Data]) -> tuple[list[str], list[Row]]:
    """Return the paths among the data, and the rows."""
    paths, rows = list[str](), list[Row]()
    for item_or_list in data:
        if isinstance(item_or_list, str | os.PathLike):
            paths.append(check_path(item_or_list))
            continue
        if isinstance(item_or_list, Mapping):
            raise UsageError(
                "data must not be a single row; put rows into a list, such as [{'text': ...}]",
                code="invalid-data",
            )
        if isinstance(item_or_list, Mapping | bytes) or not isinstance(item_or_list, Iterable):
            raise UsageError(f"{quote(item_or_list)} is not data; {TAKES}", code="invalid-data")
        for item in item_or_list:
            if isinstance(item, Mapping):
                rows.append(item)
            elif isinstance(item, str | os.PathLike):
                paths.append(check_path(item))
            else:
                raise UsageError(f"{quote(item)} in a list is not data; {TAKES}", code="invalid-data")
    if data and not paths and not rows:
        raise UsageError("the data is an empty list", code="no-data")
    return paths, rows


def check_path(path: Any) -> str:
    """Return a path as text; raise if it is none."""
    if not isinstance(path, str | os.PathLike):
        raise UsageError(
            f"{quote(path)} is not a path; name files one by one, and options by keyword", code="invalid-path"
        )
    if not is_valid_path(os.fspath(path)):
        raise UsageError(f"{quote(os.fspath(path))} is not a valid path", code="invalid-path")
    return os.fspath(path)


# ---- as files ----------------------------------------------------------------


@contextmanager
def rows_for_call(data: Sequence[Data]) -> Iterator[list[str]]:
    """Yield the data as paths; rows lie in a temporary file meanwhile."""
    paths, rows = split_data(data)
    if not rows:
        yield paths
        return
    folder = create_temp_folder()
    try:
        yield [*paths, str(write_rows(folder, "data", rows))]
    finally:
        remove_path(folder)


@contextmanager
def rows_for_run(
    command: str, data: Sequence[Data], values: dict[str, Any]
) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Yield the data of a run as paths, and its options.

    Rows lie in its folder, which is removed if nothing is saved in it.
    """
    paths, rows = split_data(data)
    others = {
        name: split_data([given])
        for name in ROW_OPTIONS
        if isinstance(given := values.get(name), list | tuple)
        and any(isinstance(item, Mapping) for item in given)
    }
    if not rows and not others:
        yield paths, values
        return
    check_single_process("rows in memory", "write them to a file that all can read")
    folder, new_folders = make_folder(command, values)
    files, saved_before = list[Path](), saved_files(folder)
    try:
        for stem, (names, some_rows) in {"data": (paths, rows), **others}.items():
            if some_rows:
                path = folder / file_name(stem, some_rows)
                files += [] if path.exists() else [path]
                names.append(str(write_rows(folder, stem, some_rows)))
        extra = {} if values.get("resume") and not values.get("out") else {"out": folder}
        yield paths, {**values, **extra, **{name: names for name, (names, _) in others.items()}}
    finally:
        with suppress(OSError):
            if saved_files(folder) == saved_before:
                for file in files:
                    remove_path(file)
                for item in new_folders:
                    item.rmdir()


def saved_files(folder: Path) -> set[tuple[str, int]]:
    """Return names and inodes of the checkpoints and results in a folder."""
    return {(file.name, file.stat().st_ino) for file in run_files(folder) if file.suffix == ".gguf"}


def make_folder(command: str, values: Mapping[str, Any]) -> tuple[Path, list[Path]]:
    """Return the folder that a run will have, and the folders that were made for it."""
    if out := values.get("out") or values.get("resume"):
        folder = Path(out)
        if folder.is_file():  # a checkpoint
            return folder.parent, []
        new_parents = missing_parents(folder)
        return folder, [folder, *new_parents] if ensure_folder(folder) else []
    new_parents = missing_parents(RUNS / command)
    folder = create_next_folder(RUNS, command)
    return folder, [folder, *new_parents]


def file_name(stem: str, rows: Sequence[Row]) -> str:
    """Return the name of a file for rows: a stem and a hash of their content."""
    key = hashlib.sha256()
    for line in encode_rows(rows):
        key.update(line)
    return f"{stem}-{key.hexdigest()[:12]}.jsonl"


def write_rows(folder: Path, stem: str, rows: Sequence[Row]) -> Path:
    """Write rows to a file of JSON lines in a folder."""
    path = folder / file_name(stem, rows)
    with AtomicFile(path) as file:
        for line in encode_rows(rows):
            file.write(line)
    return path


def encode_rows(rows: Sequence[Row]) -> Iterator[bytes]:
    """Yield rows as JSON lines."""
    for number, row in enumerate(rows, 1):
        try:
            yield json.dumps(dict(row), allow_nan=False, default=to_json).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(
                f"row {number} of the data cannot be written as JSON: {error}", code="invalid-data"
            ) from None


def to_json(value: Any) -> Any:
    """Convert what JSON does not know: NumPy numbers and arrays, mappings and other sequences."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Iterable) and not isinstance(value, bytes):
        return list(value)
    raise TypeError(f"{type(value).__name__} {quote(value)}")


def find_moved(files: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Return the files of a run; rows in its folder are found again if the folder was moved."""

    def current(file: str) -> str:
        moved = folder / Path(file).name
        if NAME.fullmatch(moved.name) and moved.exists() and not Path(file).exists():
            return os.path.abspath(moved)  # noqa: PTH100
        return file

    return tuple(map(current, files))
