"""Lists the folder that the page shows. Links that lead out of it are not followed."""

import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from llamatrain.errors import FileError, LlamatrainError
from llamatrain.report.run_data import METRICS

MODEL_SUFFIX = ".gguf"


def resolve_inside(root: Path, place: str) -> Path:
    """Return a path below the folder, with its links followed; raise if it leads out of it."""
    try:
        path = (root / place).resolve()
    except (OSError, ValueError, RuntimeError):  # RuntimeError: links in a circle
        raise outside(place) from None
    if not path.is_relative_to(root.resolve()):
        raise outside(place)
    return path


def outside(place: str) -> FileError:
    """Return the error for a path that leads out of the folder."""
    return FileError(
        f"{place}: this leads out of the folder of the page; type the path, or start `llamatrain ui` with another "
        "--folder",
        code="outside-folder",
    )


def list_folder(root: Path, place: str) -> dict[str, Any]:
    """Return what a folder below `root` contains: folders first, then files, without hidden ones."""
    folder = resolve_inside(root, place)
    here = folder.relative_to(root.resolve())
    try:
        with os.scandir(folder) as found:
            entries = [entry for entry in found if not entry.name.startswith(".")]
    except OSError as error:
        raise FileError(f"{place or '.'}: cannot be read: {error.strerror}", code="folder-error") from error
    rows = [row for entry in entries if (row := describe_entry(root, here, entry))]
    rows.sort(key=lambda row: (row["kind"] not in ("folder", "run"), row["name"].lower()))
    parent = None if here == Path() else to_text(here.parent)
    return {"folder": to_text(here), "parent": parent, "entries": rows}


def to_text(path: Path) -> str:
    """Return a relative path; the folder itself is an empty text."""
    return "" if path == Path() else path.as_posix()


def describe_entry(root: Path, here: Path, entry: "os.DirEntry[str]") -> dict[str, Any] | None:
    """Return name, path, kind and size of an entry, or None if it is gone."""
    row: dict[str, Any] = {"name": entry.name, "path": to_text(here / entry.name), "size": None}
    with suppress(OSError, UnicodeError):
        entry.name.encode()  # a name that is not UTF-8 cannot be sent
        if entry.is_symlink():
            try:
                resolve_inside(root, row["path"])
            except FileError:
                return row | {"kind": "link out of the folder"}
        if entry.is_dir():
            return row | {"kind": "run" if Path(entry.path, METRICS).is_file() else "folder"}
        if entry.is_file():
            status = entry.stat()
            return row | {
                "kind": file_kind(entry.path, status.st_size, status.st_mtime_ns),
                "size": status.st_size,
            }
    return None


@lru_cache(1 << 12)
def file_kind(path: str, size: int, changed: int) -> str:
    """Return the kind of a file: that of a GGUF file, "data", or "" for what cannot be trained on."""
    from llamatrain.data.file_kind import check_name
    from llamatrain.gguf.reader import open_gguf

    if path.lower().endswith(MODEL_SUFFIX):
        try:
            return open_gguf(Path(path)).kind
        except (LlamatrainError, OSError):
            return "damaged"
    try:
        check_name(Path(path))
    except LlamatrainError:
        return ""
    return "data"
