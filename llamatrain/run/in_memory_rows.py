"""Data that a Python program holds in memory: rows become a file of JSON lines, which is read like any other.

A run's rows lie in its own folder, so that it goes on from there with nothing else. The file is named for what is in it: rows
that are given again are the same file, and those of another run in the same folder are left alone.
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
from llamatrain.config.messages import worded
from llamatrain.config.values import is_valid_path
from llamatrain.distributed.comm import get_launch_info
from llamatrain.errors import UsageError
from llamatrain.io.atomic_write import AtomicFile
from llamatrain.platform.temp_files import create_temp_folder, remove_path

Place = str | os.PathLike[str]
Row = Mapping[str, Any]
Data = Place | Iterable[Place] | Iterable[Row]
NAME = re.compile(r"(?:data|val)-[0-9a-f]{12}\.jsonl")
TAKES = "data is a path, a list of paths, or a list of rows, each a dict"


def split(data: Sequence[Data]) -> tuple[list[str], list[Row]]:
    """The paths among the data, and the rows."""
    paths, rows = list[str](), list[Row]()
    for each in data:
        if isinstance(each, str | os.PathLike):
            paths.append(path_in(each))
            continue
        if isinstance(each, Mapping):
            raise UsageError("one row is no data; put rows into a list, such as [{'text': ...}]")
        if isinstance(each, Mapping | bytes) or not isinstance(each, Iterable):
            raise UsageError(f"{worded(each)} is no data; {TAKES}")
        for item in each:
            if isinstance(item, Mapping):
                rows.append(item)
            elif isinstance(item, str | os.PathLike):
                paths.append(path_in(item))
            else:
                raise UsageError(f"{worded(item)} in a list is no data; {TAKES}")
    if data and not paths and not rows:
        raise UsageError("the data is an empty list: there is nothing to train on")
    return paths, rows


def path_in(place: Any) -> str:
    if not isinstance(place, str | os.PathLike):
        raise UsageError(f"{worded(place)} is no path: files are named one by one, options by keyword")
    if not is_valid_path(os.fspath(place)):
        raise UsageError(f"{worded(os.fspath(place))} is no path: no file can be called so")
    return os.fspath(place)


# ---- as files ----------------------------------------------------------------


@contextmanager
def rows_for_call(data: Sequence[Data]) -> Iterator[list[str]]:
    """The data as paths; rows lie in a temporary file meanwhile."""
    paths, rows = split(data)
    if not rows:
        yield paths
        return
    folder = create_temp_folder()
    try:
        yield [*paths, str(written(folder, "data", rows))]
    finally:
        remove_path(folder)


@contextmanager
def rows_for_run(
    command: str, data: Sequence[Data], values: dict[str, Any]
) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """The data of a run as paths, and its options; rows lie in its folder, which goes again if nothing is saved in it."""
    (paths, rows), val, val_rows = split(data), list[str](), list[Row]()
    if isinstance(given := values.get("val"), list | tuple) and any(
        isinstance(each, Mapping) for each in given
    ):
        val, val_rows = split([given])
    if not rows and not val_rows:
        yield paths, values
        return
    if (started := get_launch_info()) and started.is_multi_process:
        raise UsageError(
            f"rows in memory are those of one process, and {started.description}; write them to a file that all can read"
        )
    folder, made = folder_for(command, values)
    files, before = list[Path](), saved_in(folder)
    try:
        for stem, some, names in (("data", rows, paths), ("val", val_rows, val)):
            if some:
                path = folder / name_of(stem, some)
                files += [] if path.exists() else [path]
                names.append(str(written(folder, stem, some)))
        more = {} if values.get("resume") and not values.get("out") else {"out": folder}
        yield paths, {**values, **more, **({"val": val} if val else {})}
    finally:
        with suppress(OSError):
            if saved_in(folder) == before:
                for file in files:
                    remove_path(file)
                for each in made:
                    each.rmdir()


def saved_in(folder: Path) -> set[tuple[str, int]]:
    """What a run has saved in its folder: names and inodes of its checkpoints and results."""
    return {(file.name, file.stat().st_ino) for file in run_files(folder) if file.suffix == ".gguf"}


def folder_for(command: str, values: Mapping[str, Any]) -> tuple[Path, list[Path]]:
    """The folder that a run will have, which is made here where it is not there; and the folders that were made."""
    if out := values.get("out") or values.get("resume"):
        folder = Path(out)
        if folder.is_file():  # a checkpoint
            return folder.parent, []
        above = missing_parents(folder)
        return folder, [folder, *above] if ensure_folder(folder) else []
    above = missing_parents(RUNS / command)
    folder = create_next_folder(RUNS, command)
    return folder, [folder, *above]


def name_of(stem: str, rows: Sequence[Row]) -> str:
    key = hashlib.sha256()
    for line in lines_of(rows):
        key.update(line)
    return f"{stem}-{key.hexdigest()[:12]}.jsonl"


def written(folder: Path, stem: str, rows: Sequence[Row]) -> Path:
    path = folder / name_of(stem, rows)
    with AtomicFile(path) as file:
        for line in lines_of(rows):
            file.write(line)
    return path


def lines_of(rows: Sequence[Row]) -> Iterator[bytes]:
    for number, row in enumerate(rows, 1):
        try:
            yield json.dumps(dict(row), allow_nan=False, default=plainly).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"row {number} of the data cannot be written as JSON: {error}") from None


def plainly(value: Any) -> Any:
    """What JSON does not know: numbers and arrays of numpy, mappings and other sequences."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Iterable) and not isinstance(value, bytes):
        return list(value)
    raise TypeError(f"{type(value).__name__} {worded(value)}")


def find_moved(files: Sequence[str], folder: Path) -> tuple[str, ...]:
    """The files of a run, whose rows lie in its folder, which may have been moved."""

    def current(file: str) -> str:
        moved = folder / Path(file).name
        if NAME.fullmatch(moved.name) and moved.exists() and not Path(file).exists():
            return os.path.abspath(moved)  # noqa: PTH100
        return file

    return tuple(map(current, files))
