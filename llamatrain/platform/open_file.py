"""Opens regular files only, so that no pipe blocks and no device is read without end."""

import errno
import os
import stat
from pathlib import Path

FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def open_regular(path: Path) -> tuple[int, os.stat_result]:
    """Open a regular file and return its descriptor and status."""
    descriptor = os.open(path, FLAGS)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode):
        return descriptor, status
    os.close(descriptor)
    raise OSError(errno.EINVAL, "no plain file", str(path))


def read_regular(path: Path, max_bytes: int) -> tuple[bytes, os.stat_result]:
    """Read a regular file of at most `max_bytes` bytes and return its contents and status."""
    descriptor, status = open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        if status.st_size > max_bytes:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        return file.read(max_bytes), status
