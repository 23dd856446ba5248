"""Reads whole files with a size limit, since a path may lead to something without an end."""

import stat
from pathlib import Path

from llamatrain.config.not_found import missing_file
from llamatrain.errors import FileError

OPEN = ("/dev/fd", "/proc/self/fd")  # where a shell hands over what it has opened, as for <(a command)


def read_limited(path: Path, limit: int, needed: str) -> bytes:
    """Return the bytes of a file or of an open pipe; a named pipe might wait for its writer forever."""
    is_open_pipe = str(path) == "/dev/stdin" or str(path.parent) in OPEN
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or (is_open_pipe and stat.S_ISFIFO(mode))):
            raise FileError(
                f"{path}: {needed} must be a file (got a "
                f"{'folder' if stat.S_ISDIR(mode) else 'device or pipe'})",
                code="not-a-file",
            )
        with path.open("rb") as file:
            return check_size(file.read(limit + 1), limit, str(path), needed)
    except FileNotFoundError:
        raise missing_file(path) from None
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}", code="unreadable-file") from None


def check_size(raw: bytes, limit: int, name: str, needed: str) -> bytes:
    """Raise if more than `limit` bytes were read."""
    if len(raw) > limit:
        raise FileError(f"{name}: {needed} must have at most {limit:,} bytes", code="file-too-large")
    return raw
