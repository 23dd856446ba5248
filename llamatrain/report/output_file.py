"""Writes pictures and pages, and protects other files from being overwritten."""

from collections.abc import Sequence
from pathlib import Path

from llamatrain.errors import FileError, MissingError
from llamatrain.io.atomic_write import DEVICES, AtomicFile

HEADS = (b"<svg ", b"<!doctype html>\n<!-- llamatrain -->")


def check_output_file(file: Path, heads: Sequence[bytes] = HEADS) -> None:
    """Raise if a file exists at this path that does not begin like ours, or none can be written."""
    try:
        if not file.parent.is_dir():
            raise MissingError(f"{file}: the folder does not exist", code="no-such-folder")
        if file.is_dir():
            raise FileError(f"{file}: this is a folder; give the name of a file", code="is-a-folder")
        if file.exists() and (not file.is_file() or str(file.parent) == DEVICES):
            raise FileError(
                f"{file}: this is a device or a pipe; give the name of a file", code="is-a-device"
            )
        if not file.is_file():
            return
        with file.open("rb") as existing:
            head = existing.read(max(map(len, heads)))
    except OSError as error:
        raise FileError(f"{file}: cannot be read: {error.strerror}", code="read-failed") from error
    if head and not head.startswith(tuple(heads)):
        raise FileError(
            f"{file}: the file exists and was not written by llamatrain; choose another name",
            code="file-exists",
        )


def write_text(file: Path, text: str) -> None:
    """Write a file atomically."""
    with AtomicFile(file) as out:
        out.write(text.encode())
