"""Computes SHA-256 checksums of files, and remembers which files had the right one."""

import hashlib
import json
from pathlib import Path

from llamatrain.errors import FileError
from llamatrain.io.atomic_write import AtomicFile
from llamatrain.platform.cache_dir import writable_cache_dir
from llamatrain.platform.terminal import progress_bar

CHUNK_BYTES = 1 << 20  # bytes that are read at a time


def verify(path: Path, sha256: str, name: str) -> None:
    """Raise FileError if a file has another checksum. A file that did not change is not read again."""
    status = path.stat()
    identity = [str(path), status.st_size, status.st_mtime_ns, status.st_ino]
    folder = writable_cache_dir("checksums")
    record = folder / sha256 if folder else None
    if record and read_identity(record) == identity:
        return
    if (found := compute_sha256(path, name)) != sha256:
        raise FileError(
            f"{name}: {path} is damaged: its SHA-256 is {found} and must be {sha256}; get it again",
            code="wrong-checksum",
        )
    if record:
        with AtomicFile(record) as file:
            file.write(json.dumps(identity).encode())


def read_identity(record: Path) -> object:
    """Return the identity of the file that had a checksum, or None."""
    try:
        return json.loads(record.read_bytes())
    except (OSError, ValueError):
        return None


def compute_sha256(path: Path, name: str) -> str:
    """Return the checksum of a file."""
    total, digest = path.stat().st_size, hashlib.sha256()
    try:
        with (
            path.open("rb") as file,
            progress_bar(f"checking {name}", total=total, unit="B", unit_scale=True) as bar,
        ):
            while block := file.read(CHUNK_BYTES):
                digest.update(block)
                bar.update(len(block))
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}", code="read-failed") from error
    return digest.hexdigest()
