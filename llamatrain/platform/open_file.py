"""Files that are opened only if they are plain ones: no pipe is waited for, and no device read without end."""

import errno
import os
import stat
from pathlib import Path

HOW = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def opened(path: Path) -> tuple[int, os.stat_result]:
    """The number of an open file, and what it is."""
    number = os.open(path, HOW)
    status = os.fstat(number)
    if stat.S_ISREG(status.st_mode):
        return number, status
    os.close(number)
    raise OSError(errno.EINVAL, "no plain file", str(path))


def content(path: Path, most: int) -> tuple[bytes, os.stat_result]:
    """All of a file of so many bytes at most, and what it is."""
    number, status = opened(path)
    with os.fdopen(number, "rb") as file:
        if status.st_size > most:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        return file.read(most), status
