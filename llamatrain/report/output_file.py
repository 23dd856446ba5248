"""Pictures and pages as files: they replace their like, and nothing else."""

from pathlib import Path

from llamatrain.errors import FileError, MissingError
from llamatrain.io.atomic_write import DEVICES, AtomicFile

HEADS = (b"<svg ", b"<!doctype html>\n<!-- llamatrain -->")


def check_output_file(file: Path) -> None:
    """Where a file is asked for by name, what stands there must be one that was drawn before."""
    try:
        if not file.parent.is_dir():
            raise MissingError(f"{file}: its folder is not there")
        if file.is_dir():
            raise FileError(f"{file}: this is a folder; a name for a file is needed")
        if file.exists() and (not file.is_file() or str(file.parent) == DEVICES):
            raise FileError(f"{file}: this is a device or a pipe, no place for a file")
        if not file.is_file():
            return
        with file.open("rb") as there:
            head = there.read(max(map(len, HEADS)))
    except OSError as error:
        raise FileError(f"{file}: cannot be looked at: {error.strerror}") from error
    if head and not head.startswith(HEADS):
        raise FileError(
            f"{file}: there is a file already that was not drawn here; another name leaves it alone"
        )


def write_text(file: Path, text: str) -> None:
    with AtomicFile(file) as out:
        out.write(text.encode())
