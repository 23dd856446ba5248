"""Rules of Windows for a program on Linux: what files refuse there, what is missing, and what its libraries answer.

`install()` is called first in a process of its own. Then the package takes its branches for Windows. An open file
can neither be removed nor renamed nor replaced, unless it was opened to be shared; a mapped one can be moved but
not removed. Paths have at most 259 characters, names differ in more than their case, and processes do not fork.
"""

import ctypes
import fcntl
import os
import select
import signal
import sys
import tempfile
import termios
import types
from pathlib import Path
from typing import Any

import filelock

LONGEST = 259
MISSING = ("pread", "pwrite", "geteuid", "getuid", "getegid", "fork", "sysconf", "register_at_fork")
MISSING += ("sched_getaffinity", "sched_setaffinity")
UNIX_MODULES = ("fcntl", "resource", "termios", "pwd", "grp")
REFUSED = 13  # EACCES
shared: set[tuple[int, int]] = set()  # files that were opened to be shared
calls: list[str] = []  # of functions of kernel32


def identify(path: Any) -> tuple[int, int] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def open_files() -> set[tuple[int, int]]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            status = entry.stat()
        except OSError:
            continue
        found.add((status.st_dev, status.st_ino))
    return found


def refuse(path: Any, what: str, may_be_shared: bool) -> None:
    """Raise PermissionError if the file, or one in the folder, is open."""
    here = Path(os.fsdecode(path))
    files = [here, *here.rglob("*")] if here.is_dir() and not here.is_symlink() else [here]
    held = open_files()
    for file in files:
        identity = identify(file)
        if identity in held and not (may_be_shared and identity in shared):
            raise PermissionError(REFUSED, f"{what}: the file is open", str(file))


def check_name(path: Any) -> None:
    if isinstance(path, int):
        return
    text = str(Path(os.fsdecode(path)).absolute())
    if len(text) > LONGEST:
        raise FileNotFoundError(2, "the path is too long", text)


def guard_files() -> None:
    import io

    real = {name: getattr(os, name) for name in ("remove", "unlink", "rename", "replace", "rmdir", "open")}

    def remove(path: Any, *, dir_fd: Any = None) -> None:
        if dir_fd is None:
            refuse(path, "remove", may_be_shared=False)
        real["unlink"](path, dir_fd=dir_fd)

    def rename(source: Any, target: Any, **how: Any) -> None:
        refuse(source, "rename", may_be_shared=True)
        if os.path.lexists(target):
            raise FileExistsError(17, "the target exists", os.fsdecode(target))
        check_name(target)
        real["rename"](source, target, **how)

    def replace(source: Any, target: Any, **how: Any) -> None:
        refuse(source, "replace", may_be_shared=True)
        if os.path.lexists(target):
            refuse(target, "replace", may_be_shared=False)
        check_name(target)
        real["replace"](source, target, **how)

    def open_descriptor(path: Any, flags: int, *rest: Any, **how: Any) -> int:
        check_name(path)
        if how.get("dir_fd") is None and Path(path).is_dir():
            raise PermissionError(REFUSED, "a folder cannot be opened", os.fsdecode(path))
        return real["open"](path, flags, *rest, **how)

    os.remove = os.unlink = remove
    os.rename, os.replace, os.open = rename, replace, open_descriptor
    opened = io.open

    def open_stream(path: Any, *rest: Any, **how: Any) -> Any:
        check_name(path)
        return opened(path, *rest, **how)

    io.open = open_stream


class ExclusiveFile:
    """A lock by an open file, in place of filelock's."""

    def __init__(self, path: Path, timeout: float) -> None:
        self.path, self.file = path, -1

    def acquire(self) -> None:
        self.file = os.open(self.path, os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.file)
            raise filelock.Timeout(str(self.path)) from None

    def release(self) -> None:
        os.close(self.file)


class Kernel32:
    """The functions of the system that the package calls, with the results that matter."""

    def __getattr__(self, name: str) -> Any:
        real = ANSWERS[name]

        class Function:
            restype: Any = None

            def __call__(self, *arguments: Any) -> Any:
                calls.append(name)
                return real(*arguments)

        function = Function()
        setattr(self, name, function)
        return function


def get_current_process() -> int:
    return 1


def get_process_memory_info(process: Any, counters: Any, size: int) -> int:
    counters._obj.resident = counters._obj.peak = 50_000_000
    return 1


def global_memory_status_ex(status: Any) -> int:
    status._obj.total, status._obj.available = 16 << 30, 8 << 30
    return 1


def is_processor_feature_present(number: int) -> int:
    return int(number == 40)  # AVX2


def virtual_unlock(address: Any, size: Any) -> int:
    return 0


def set_console_ctrl_handler(handler: Any, add: int) -> int:
    return 1


def create_job_object(attributes: Any, name: Any) -> int:
    return 7


def set_information_job_object(job: Any, kind: int, limits: Any, size: int) -> int:
    assert limits._obj.flags == 0x2100 and limits._obj.process_memory > 0 and size == 144
    return 1


def assign_process_to_job_object(job: Any, process: Any) -> int:
    return 1


def create_file(path: str, *settings: Any) -> int | None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        ctypes.set_errno(error.errno or 1)
        return None
    status = os.fstat(descriptor)
    shared.add((status.st_dev, status.st_ino))
    return descriptor


def peek_named_pipe(handle: Any, *arguments: Any) -> int:
    waiting = arguments[3]._obj
    ready, _, _ = select.select([handle.value], [], [], 0)
    count = bytearray(4)
    fcntl.ioctl(handle.value, termios.FIONREAD, count)
    waiting.value = int.from_bytes(count, sys.byteorder)
    return int(not ready or waiting.value > 0)  # 0: the other end is closed


ANSWERS = {
    "IsProcessorFeaturePresent": is_processor_feature_present,
    "GetCurrentProcess": get_current_process,
    "K32GetProcessMemoryInfo": get_process_memory_info,
    "GlobalMemoryStatusEx": global_memory_status_ex,
    "VirtualUnlock": virtual_unlock,
    "SetConsoleCtrlHandler": set_console_ctrl_handler,
    "CreateJobObjectW": create_job_object,
    "SetInformationJobObject": set_information_job_object,
    "AssignProcessToJobObject": assign_process_to_job_object,
    "CreateFileW": create_file,
    "PeekNamedPipe": peek_named_pipe,
}


def install() -> None:
    """Let this process follow the rules; third parties are imported before, as they are here."""
    import subprocess

    import jinja2.ext
    import jinja2.sandbox  # noqa: F401
    import numpy as np  # noqa: F401
    import platformdirs  # noqa: F401
    import rich.console  # noqa: F401
    import tqdm  # noqa: F401
    import typer  # noqa: F401
    from gguf import GGUFReader  # noqa: F401

    filelock.FileLock = ExclusiveFile  # the real one looks at the system each time
    tempfile.TemporaryFile = tempfile.NamedTemporaryFile  # type: ignore[assignment]  # as on Windows
    guard_files()
    for name in MISSING:
        if hasattr(os, name):
            delattr(os, name)
    for module in UNIX_MODULES:
        sys.modules[module] = None  # type: ignore[assignment]
    for name in ("SIGHUP", "SIGBUS", "setitimer"):
        delattr(signal, name)
    signal.SIGBREAK = signal.SIGUSR2  # type: ignore[attr-defined]
    msvcrt: Any = types.ModuleType("msvcrt")
    msvcrt.get_osfhandle = msvcrt.open_osfhandle = lambda number, flags=0: number
    sys.modules["msvcrt"] = msvcrt
    kernel = Kernel32()
    subprocess.Popen._handle = 5  # type: ignore[attr-defined]
    windows: Any = ctypes
    windows.WinDLL = lambda name, **settings: kernel
    windows.WINFUNCTYPE, windows.get_last_error = ctypes.CFUNCTYPE, ctypes.get_errno
    windows.WinError = lambda number: OSError(number, os.strerror(number))
    sys.platform = "win32"
