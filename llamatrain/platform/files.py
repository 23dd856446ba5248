"""Files: regular ones only, reads at an offset, replacement by name, and who else may read them."""

import ctypes
import errno
import os
import stat
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from llamatrain.platform.temp_files import register_for_removal, remove_path

if sys.platform == "win32":
    import msvcrt

FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
GENERIC_READ, SHARE_ALL, OPEN_EXISTING, NORMAL_FILE = 0x80000000, 7, 3, 0x80  # of Windows
INVALID_HANDLE = ctypes.c_void_p(-1).value
CAN_MOVE_OPEN_FILES = sys.platform != "win32"  # and folders that contain them
REPLACE_SECONDS = 2.0  # for which a file may be held by a program that scans it
POLL_SECONDS = 0.05
_position_lock = threading.Lock()


def open_regular(path: Path) -> tuple[int, os.stat_result]:
    """Open a regular file and return its descriptor and status: no pipe blocks, no device is read without end."""
    descriptor = os.open(path, FLAGS)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode):
        return descriptor, status
    os.close(descriptor)
    raise OSError(errno.EINVAL, "no plain file", str(path))


def open_to_map(path: Path) -> int:
    """Open a file that will be mapped, and return its descriptor. Others can move it, also on Windows."""
    if sys.platform == "win32":
        create = ctypes.WinDLL("kernel32", use_last_error=True).CreateFileW
        create.restype = ctypes.c_void_p
        handle = create(str(path), GENERIC_READ, SHARE_ALL, None, OPEN_EXISTING, NORMAL_FILE, None)
        if handle in (None, INVALID_HANDLE):
            raise ctypes.WinError(ctypes.get_last_error())
        return msvcrt.open_osfhandle(handle, FLAGS)
    else:
        return os.open(path, FLAGS)


def read_regular(path: Path, max_bytes: int) -> tuple[bytes, os.stat_result]:
    """Read a regular file of at most `max_bytes` bytes and return its contents and status."""
    descriptor, status = open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        if status.st_size > max_bytes:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        return file.read(max_bytes), status


def read_at(descriptor: int, count: int, offset: int) -> bytes:
    """Read bytes at an offset of an open file; fewer at its end."""
    if sys.platform == "win32":
        parts = []
        with _position_lock:  # several descriptors may share a position
            os.lseek(descriptor, offset, os.SEEK_SET)
            while count and (part := os.read(descriptor, count)):
                parts.append(part)
                count -= len(part)
        return b"".join(parts)
    else:
        return os.pread(descriptor, count, offset)


def raise_open_file_limit(count: int) -> None:
    """Raise the limit on open files: data of a thousand files needs more than the usual 1024."""
    if sys.platform != "win32":
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and count > soft:
            allowed = 2 * count if hard == resource.RLIM_INFINITY else min(2 * count, hard)
            with suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


# ---- names -----------------------------------------------------------------


def replace_file(new: Path, target: Path) -> None:
    """Give a complete file its name, in place of another one, and wait until that is on the disk."""
    if CAN_MOVE_OPEN_FILES:
        new.replace(target)
        sync_folder(target.parent)
    else:
        replace_held_file(new, target)


def replace_held_file(new: Path, target: Path) -> None:
    """Replace a file that a program may hold open: Windows refuses that, sometimes for a moment only.

    If it lasts, the old file is moved out of the way. It gets the name of an unfinished file, which is removed
    when nobody uses it any more.
    """
    deadline = time.monotonic() + REPLACE_SECONDS
    while True:
        try:
            new.replace(target)
            return
        except PermissionError:
            if time.monotonic() > deadline:
                break
        time.sleep(POLL_SECONDS)
    aside = target.with_name(f".{target.name}.{os.urandom(4).hex()}.tmp")
    target.rename(aside)
    register_for_removal(aside)
    try:
        new.rename(target)
    except OSError:
        aside.rename(target)
        raise
    remove_path(aside)
    register_for_removal(aside)  # if it is in use until the end of this process


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where the system can be asked for it."""
    if sys.platform != "win32":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# ---- owners ----------------------------------------------------------------


def user_name_part() -> str | None:
    """Return what tells this user's files from others' in a shared folder; None where users have their own."""
    if sys.platform == "win32":
        return None
    else:
        return str(os.geteuid())


def is_private(status: os.stat_result) -> bool:
    """Return True if a file belongs to this user and nobody else may use it.

    Windows keeps that apart from the mode, and gives users folders of their own.
    """
    if sys.platform == "win32":
        return True
    else:
        return status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077
