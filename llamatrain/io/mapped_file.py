"""Files mapped into memory, which others may write to, cut short or replace meanwhile: what was done to one is seen, and said.

What is mapped of a file that was replaced by another of its name is still the file that was opened. One that was written to in
place shows the new bytes, and one that was cut short has none behind its new end: whoever reads there gets a SIGBUS, which
ends a process without a word. So those pages are made zeros, and the reader goes on until it asks whether the file is sound.
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


class ChangedError(FileError):
    """A file that was changed while it was being read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileIdentity:
    """Which file it is, how long, and when it was written to last."""

    device: int
    inode: int
    size: int
    mtime_ns: int  # nanoseconds

    @classmethod
    def read(cls, file: int | Path) -> Self:
        """Of an open file, or of the one that has a name now."""
        status = file.stat() if isinstance(file, Path) else os.fstat(file)
        return cls(
            device=status.st_dev, inode=status.st_ino, size=status.st_size, mtime_ns=status.st_mtime_ns
        )

    def is_same_file(self, other: Self) -> bool:
        return (self.device, self.inode) == (other.device, other.inode)


class MappedFile(mmap.mmap):
    """It has a descriptor of its own, which knows the file under any name."""

    path: Path
    identity: FileIdentity
    start: int  # address
    has_lost_pages: bool  # whether some of it could not be read, and is zeros
    _descriptor: int

    def __new__(cls, path: Path, descriptor: int) -> Self:
        identity = FileIdentity.read(descriptor)
        file = super().__new__(cls, descriptor, identity.size, access=mmap.ACCESS_READ)
        file.path, file.identity, file.has_lost_pages, file._descriptor = (
            path,
            identity,
            False,
            os.dup(descriptor),
        )
        file.start = np.frombuffer(file, np.uint8).ctypes.data
        weakref.finalize(file, os.close, file._descriptor).atexit = False
        open_mappings[file.start] = file
        guard.install()
        return file

    @property
    def current_identity(self) -> FileIdentity:
        return FileIdentity.read(self._descriptor)

    def read_bytes(self, offset: int, count: int) -> bytes:
        """Bytes read from the file, not from the mapping: fewer where it ends before."""
        if not hasattr(os, "pread"):
            return self[offset : offset + count]
        try:
            return os.pread(self._descriptor, count, offset)
        except OSError as error:
            raise FileError(f"{self.path}: {error.strerror}") from error

    def describe_change(self) -> str | None:
        """What was done to the bytes that were mapped since then, if anything."""
        now = self.current_identity
        if now.size < self.identity.size:
            return f"was cut short, from {self.identity.size} to {now.size} bytes, while it was being read"
        if (now.size, now.mtime_ns) != (self.identity.size, self.identity.mtime_ns):
            return "was written to while it was being read"
        return "cannot be read to its end: the disk may be failing" if self.has_lost_pages else None

    def check(self) -> None:
        if change := self.describe_change():
            raise ChangedError(
                f"{self.path}: {change}; once it is whole and nobody writes to it, the same command will do"
            )


def map_file(path: Path, needed: str = "a GGUF file") -> MappedFile:
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):  # asked before it is opened: a pipe would wait for a writer
            raise FileError(
                f"{path}: this is a {'folder' if stat.S_ISDIR(mode) else 'device or pipe'}; {needed} is needed"
            )
        with path.open("rb") as file:
            if not file.seek(0, 2):
                raise FileError(f"{path}: the file is empty; {needed} is needed")
            return MappedFile(path, file.fileno())
    except ValueError as error:  # it was cut short in this very moment
        raise ChangedError(
            f"{path}: was cut short while it was being opened; once it is whole, the same command will do"
        ) from error
    except FileNotFoundError:
        raise missing_model(path) from None
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from error


def mapped_files(arrays: Iterable[np.ndarray]) -> list[MappedFile]:
    """Those that some of the arrays lie in."""
    return list(
        {id(file): file for array in arrays if isinstance(file := find_mapping(array), MappedFile)}.values()
    )


def check_files(files: Iterable[MappedFile]) -> None:
    for file in files:
        file.check()


@contextmanager
def verify_unchanged(files: Iterable[MappedFile]) -> Iterator[None]:
    """What is read of them in the block was theirs from the beginning to the end; else that is told, whatever else failed."""
    try:
        yield
    except Exception:
        check_files(files)
        raise
    check_files(files)


# ---- the signal ------------------------------------------------------------

open_mappings: weakref.WeakValueDictionary[int, MappedFile] = weakref.WeakValueDictionary()  # by address
MAP_FIXED = 0x10
# By platform, of 64 bits: the bytes of a sigset_t, the flags SA_SIGINFO and SA_RESTART, and where a siginfo_t has the address.
SIGNAL_LAYOUTS = {"linux": (128, 0x4 | 0x10000000, 16), "darwin": (4, 0x40 | 0x2, 24)}


class SigbusGuard:
    """Answers SIGBUS: of a mapped file's pages by zeros; any other goes to whoever had the signal before."""

    def __init__(self) -> None:
        self.is_supported = (
            sys.platform in SIGNAL_LAYOUTS and struct.calcsize("P") == 8 and hasattr(signal, "SIGBUS")
        )
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
        return self.action.pack(handler, b"", flags, 0)

    def install(self) -> None:
        """Unless it is in its place already."""
        if not self.is_supported:
            return
        current = ctypes.create_string_buffer(self.action.size)
        self.libc.sigaction(signal.SIGBUS, None, current)
        if self.action.unpack(current.raw)[0] != self.handler:
            self.previous = current.raw
            self.libc.sigaction(signal.SIGBUS, self.pack_action(self.handler, self.flags), None)

    def handle_fault(self, number: int, info: int, context: int) -> None:
        """Called by the thread that reads, in the midst of it; when this returns, it reads again.

        It may be one of compiled code: the one that waits for it has let go of Python's lock.
        """
        address = ctypes.c_void_p.from_address(info + self.address_at).value or 0
        for reference in open_mappings.valuerefs():
            file = reference()
            if file is not None and file.start <= address < file.start + len(file):
                page = address - address % mmap.PAGESIZE
                flags = mmap.MAP_PRIVATE | MAP_FIXED | mmap.MAP_ANONYMOUS
                if self.libc.mmap(page, file.start + len(file) - page, mmap.PROT_READ, flags, -1, 0) == page:
                    file.has_lost_pages = True
                    return
        self.libc.sigaction(signal.SIGBUS, self.previous, None)
        self.previous = self.default  # who has it now may hand it back


guard = SigbusGuard()
