"""Memory-mapped files, with detection of changes that others make meanwhile.

If a file is replaced by another of the same name, the mapping still shows the old file. If it is written in
place, the mapping shows the new bytes. If it is truncated, reading behind the new end raises SIGBUS, which
would kill the process without a message. So a signal handler maps zeros there; the reader continues, and
`check` reports the change.
"""

import ctypes
import mmap
import os
import signal
import stat
import struct
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from llamatrain.config.not_found import missing_model
from llamatrain.errors import FileError
from llamatrain.io.madvise import find_mapping
from llamatrain.platform.files import open_to_map, read_at


class ChangedError(FileError):
    """A file was changed while it was being read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileIdentity:
    """The device, inode, size and modification time of a file."""

    device: int
    inode: int
    size: int
    mtime_ns: int  # nanoseconds

    @classmethod
    def read(cls, file: int | Path) -> Self:
        """Return the identity of an open file (its descriptor) or of the file at a path."""
        status = file.stat() if isinstance(file, Path) else os.fstat(file)
        return cls(
            device=status.st_dev, inode=status.st_ino, size=status.st_size, mtime_ns=status.st_mtime_ns
        )

    def is_same_file(self, other: Self) -> bool:
        """Return True if both are the same file, whatever was written to it."""
        return (self.device, self.inode) == (other.device, other.inode)


class MappedFile(mmap.mmap):
    """A read-only mapping with its own descriptor, which identifies the file even after a rename."""

    path: Path
    identity: FileIdentity
    start: int  # address
    has_lost_pages: bool  # True if some pages could not be read and are zeros
    _descriptor: int

    def __new__(cls, path: Path, descriptor: int) -> Self:
        """Map an open file."""
        identity = FileIdentity.read(descriptor)
        file = super().__new__(cls, descriptor, identity.size, access=mmap.ACCESS_READ)
        file.path = path
        file.identity = identity
        file.has_lost_pages = False
        file._descriptor = os.dup(descriptor)
        file.start = np.frombuffer(file, np.uint8).ctypes.data
        weakref.finalize(file, os.close, file._descriptor).atexit = False
        open_mappings[file.start] = file
        guard.install()
        return file

    @property
    def current_identity(self) -> FileIdentity:
        """The identity of the file now."""
        return FileIdentity.read(self._descriptor)

    def read_bytes(self, offset: int, count: int) -> bytes:
        """Read bytes from the file, not from the mapping. The result is shorter at the end of the file."""
        try:
            return read_at(self._descriptor, count, offset)
        except OSError as error:
            raise FileError(f"{self.path}: {error.strerror}", code="read-failed") from error

    def describe_change(self) -> str | None:
        """Return what happened to the mapped bytes since the file was opened, or None."""
        now = self.current_identity
        if now.size < self.identity.size:
            return f"was truncated from {self.identity.size} to {now.size} bytes while it was being read"
        if (now.size, now.mtime_ns) != (self.identity.size, self.identity.mtime_ns):
            return "was written to while it was being read"
        return "cannot be read to its end: the disk may be failing" if self.has_lost_pages else None

    def check(self) -> None:
        """Raise ChangedError if the file was changed since it was opened."""
        if change := self.describe_change():
            raise ChangedError(
                f"{self.path}: {change}; repeat the command when the file is complete and nobody writes "
                "to it",
                code="file-changed",
            )


def map_file(path: Path, needed: str = "a GGUF file") -> MappedFile:
    """Map a regular file; `needed` says in the error what the file should be."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):  # checked before it is opened: a pipe would block
            raise FileError(
                f"{path}: this is a {'folder' if stat.S_ISDIR(mode) else 'device or pipe'}; {needed} is "
                "needed",
                code="not-a-file",
            )
        with os.fdopen(open_to_map(path), "rb") as file:
            if not file.seek(0, 2):
                raise FileError(f"{path}: the file is empty; {needed} is needed", code="empty-file")
            return MappedFile(path, file.fileno())
    except ValueError as error:  # it was truncated just now
        raise ChangedError(
            f"{path}: was truncated while it was being opened; repeat the command when it is complete",
            code="file-changed",
        ) from error
    except FileNotFoundError:
        raise missing_model(path) from None
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}", code="read-failed") from error


def mapped_files(arrays: Iterable[np.ndarray]) -> list[MappedFile]:
    """Return the mapped files that the arrays lie in, each once."""
    return list(
        {id(file): file for array in arrays if isinstance(file := find_mapping(array), MappedFile)}.values()
    )


def check_files(files: Iterable[MappedFile]) -> None:
    """Raise ChangedError if one of the files was changed since it was opened."""
    for file in files:
        file.check()


@contextmanager
def verify_unchanged(files: Iterable[MappedFile]) -> Iterator[None]:
    """Raise ChangedError at the end of the block if a file was changed, even if something else failed."""
    try:
        yield
    except Exception:
        check_files(files)
        raise
    check_files(files)


# ---- the signal ------------------------------------------------------------

open_mappings: weakref.WeakValueDictionary[int, MappedFile] = weakref.WeakValueDictionary()  # by address
MAP_FIXED = 0x10
SIGBUS = getattr(signal, "SIGBUS", 0)  # Windows has no such signal: it does not truncate a mapped file
PRIVATE_PAGES = MAP_FIXED | getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
READABLE = getattr(mmap, "PROT_READ", 0)
# By 64-bit platform: the size of sigset_t, the flags SA_SIGINFO | SA_RESTART, the offset of the address in
# siginfo_t.
SIGNAL_LAYOUTS = {"linux": (128, 0x4 | 0x10000000, 16), "darwin": (4, 0x40 | 0x2, 24)}


class SigbusGuard:
    """A handler of SIGBUS that maps zeros into files of ours and passes other faults to the previous handler."""

    def __init__(self) -> None:
        self.is_supported = sys.platform in SIGNAL_LAYOUTS and struct.calcsize("P") == 8 and bool(SIGBUS)
        if self.is_supported:
            mask, self.flags, self.address_at = SIGNAL_LAYOUTS[sys.platform]
            self.action = struct.Struct(f"@P{mask}siP")  # handler, mask, flags, restorer
            self.libc = ctypes.CDLL(None)
            self.libc.mmap.restype = ctypes.c_void_p
            self.libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
            self.callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(
                self.handle_fault
            )
            self.handler = ctypes.cast(self.callback, ctypes.c_void_p).value or 0
            self.default = self.pack_action(0, 0)
            self.previous = self.default

    def pack_action(self, handler: int, flags: int) -> bytes:
        """Return a C `struct sigaction` as bytes."""
        return self.action.pack(handler, b"", flags, 0)

    def install(self) -> None:
        """Install the handler, unless it is the current one."""
        if not self.is_supported:
            return
        current = ctypes.create_string_buffer(self.action.size)
        self.libc.sigaction(SIGBUS, None, current)
        if self.action.unpack(current.raw)[0] != self.handler:
            self.previous = current.raw
            self.libc.sigaction(SIGBUS, self.pack_action(self.handler, self.flags), None)

    def handle_fault(self, number: int, info: int, context: int) -> None:
        """Map zeros at the fault address, so that the interrupted read succeeds when it is repeated.

        The thread that reads calls this, possibly from compiled code, whose caller has released the GIL.
        """
        address = ctypes.c_void_p.from_address(info + self.address_at).value or 0
        for reference in open_mappings.valuerefs():
            file = reference()
            if file is not None and file.start <= address < file.start + len(file):
                page = address - address % mmap.PAGESIZE
                size = file.start + len(file) - page
                if self.libc.mmap(page, size, READABLE, PRIVATE_PAGES, -1, 0) == page:
                    file.has_lost_pages = True
                    return
        self.libc.sigaction(SIGBUS, self.previous, None)
        self.previous = self.default  # the previous handler may restore ours


guard = SigbusGuard()
