"""Wraps file operations in the process of the command, counts them, and does something before one of them.

The plan is JSON in the environment. `under`: folders whose operations count; `at`: the number of the
operation before
which `do` happens: kill, full, count, move, remove or change; `bytes`: how many may be written; `part`: the
share of that
one write that still succeeds; `memory`: bytes that may be mapped in addition to those of now.
"""

import builtins
import errno
import io
import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHANGES = (
    "rename",
    "replace",
    "unlink",
    "remove",
    "link",
    "symlink",
    "mkdir",
    "rmdir",
    "truncate",
    "ftruncate",
    "fsync",
    "write",
)
BY_NUMBER = ("fsync", "ftruncate", "write", "pwrite")
real_open, real_os_open, real_replace = io.open, os.open, os.replace


class NoSpaceError(OSError):
    """Raised when a write needs more bytes than are free."""

    def __init__(self, free_bytes: int) -> None:
        super().__init__(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.free_bytes = free_bytes


class Shim:
    """Counts operations in some folders and acts at one of them."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.under = tuple(os.path.realpath(folder) for folder in plan.get("under", ()))
        self.count = self.written = 0
        self.done = self.busy = False

    def is_watched(self, target: Any) -> bool:
        """Return whether a path or descriptor is in one of the folders."""
        try:
            if isinstance(target, int):
                path = str(Path(f"/proc/self/fd/{target}").readlink())
            else:
                path = os.path.realpath(Path(os.fsdecode(target)).parent)
        except (OSError, TypeError, ValueError):
            return False
        return any(path == folder or path.startswith(folder + os.sep) for folder in self.under)

    def count_operation(self, target: Any, size: int = 0) -> None:
        """Count an operation before it happens, and act if it is the one of the plan."""
        if self.busy or not self.is_watched(target):
            return
        self.count += 1
        self.written += size
        if counter := self.plan.get("count"):
            self.write_number(counter, os.O_TRUNC, self.count)
        if sizes := self.plan.get("sizes"):
            self.write_number(sizes, os.O_APPEND, size)
        full = self.plan.get("do") == "full"
        if (
            full
            and size
            and (self.count >= self.plan["at"] if "at" in self.plan else self.written > self.plan["bytes"])
        ):
            raise NoSpaceError(self.free_bytes(size))
        if self.plan.get("do") == "deny":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(target))
        if self.count == self.plan.get("at") and not full and not self.done:
            self.done = self.busy = True
            STRIKES[self.plan["do"]](self.plan)
            self.busy = False

    def free_bytes(self, size: int) -> int:
        """Return how many bytes of a write still succeed."""
        if "bytes" in self.plan:
            return max(0, int(self.plan["bytes"]) - self.written + size)
        return int(size * self.plan.get("part", 0)) if self.count == self.plan["at"] else 0

    def write_number(self, path: str, flag: int, number: int) -> None:
        """Write a number to a file of the trial."""
        self.busy = True
        target = real_os_open(path, os.O_WRONLY | os.O_CREAT | flag)
        real_write(target, f"{number}\n".encode())
        os.close(target)
        self.busy = False


real_write = os.write


class WatchedFile(io.FileIO):
    """A file whose writes are counted."""

    def write(self, data: Any) -> int:
        """Write as much as there is room for."""
        try:
            SHIM.count_operation(self.fileno(), memoryview(data).nbytes)
        except NoSpaceError as error:
            if not error.free_bytes:
                raise
            return super().write(memoryview(data).cast("B")[: error.free_bytes])
        return super().write(data)

    def truncate(self, size: int | None = None) -> int:
        """Truncate the file."""
        SHIM.count_operation(self.fileno())
        return super().truncate(size)


def watched_open(
    file: Any,
    mode: str = "r",
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: Any = None,
) -> Any:
    """Replace `open`: files that are written in the folders are watched."""
    if not set(mode) & set("wax+") or not SHIM.is_watched(file):
        return real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
    if not isinstance(file, int):
        SHIM.count_operation(file, 1 if SHIM.plan.get("do") == "deny" else 0)
    raw = WatchedFile(file, mode.replace("b", "").replace("t", ""), closefd, opener)
    if "b" in mode and buffering == 0:
        return raw
    buffered: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
    if "b" in mode:
        return buffered
    return io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)


def wrap_function(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of `os` that counts its calls."""

    def call(target: Any, *more: Any, **named: Any) -> Any:
        """Count the operation and call the function."""
        size = memoryview(more[0]).nbytes if name in ("write", "pwrite") and more else 0
        concerned = more[0] if name in ("rename", "replace", "link", "symlink") and more else target
        SHIM.count_operation(concerned, size)
        return real(target, *more, **named)

    return call


def watched_os_open(path: Any, flags: int, *more: Any, **named: Any) -> int:
    """Replace `os.open`: opening for writing counts."""
    if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
        SHIM.count_operation(path)
    return real_os_open(path, flags, *more, **named)


def watch_opening() -> None:
    """Count every file that is opened or mapped, from the first time that the input is opened."""
    opened = False

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        """Count an audit event and act if it is the one of the plan."""
        nonlocal opened
        if event not in ("open", "mmap.__new__", "os.rename", "os.remove", "os.listdir", "os.scandir"):
            return
        path = arguments[0] if arguments else None
        opened = opened or (
            event == "open"
            and isinstance(path, str | bytes)
            and os.fsdecode(path).endswith(SHIM.plan["after"])
        )
        if opened and not SHIM.busy:
            SHIM.count += 1
            if counter := SHIM.plan.get("count"):
                SHIM.write_number(counter, os.O_TRUNC, SHIM.count)
            if SHIM.count == SHIM.plan.get("at") and not SHIM.done:
                SHIM.done = SHIM.busy = True
                STRIKES[SHIM.plan["do"]](SHIM.plan)
                SHIM.busy = False

    sys.addaudithook(hook)


# ---- actions ---------------------------------------------------------------


def die(_: dict[str, Any]) -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def change(plan: dict[str, Any]) -> None:
    """Replace, overwrite, cut, unlink or edit a file."""
    path, flag = Path(plan["input"]), plan["manner"]
    other = Path(plan["other"]) if plan.get("other") else path
    if flag == "replaced":
        copy = path.with_name(path.name + ".copy")
        shutil.copyfile(other, copy)
        real_replace(copy, path)
    elif flag == "overwritten":
        with real_open(path, "r+b") as file:
            file.truncate(0)
            file.write(other.read_bytes())
    elif flag in ("halved", "emptied"):
        with real_open(path, "r+b") as file:
            file.truncate(path.stat().st_size // 2 if flag == "halved" else 0)
    elif flag == "unlinked":
        path.unlink()
    elif flag == "edited":  # in place: every float from the middle on becomes NaN
        size = path.stat().st_size
        with real_open(path, "r+b") as file:
            file.seek(size // 8 * 4)
            file.write(b"\xff" * (size - size // 8 * 4))


def move(plan: dict[str, Any]) -> None:
    """Rename the folder."""
    real_rename(plan["folder"], plan["folder"] + "-moved")


def remove(plan: dict[str, Any]) -> None:
    """Remove the folder."""
    shutil.rmtree(plan["folder"])


def delete(plan: dict[str, Any]) -> None:
    """Delete the file."""
    Path(plan["folder"]).unlink(missing_ok=True)


real_rename = os.rename
STRIKES = {
    "kill": die,
    "change": change,
    "move": move,
    "remove": remove,
    "delete": delete,
    "count": lambda _: None,
}
SHIM = Shim({})


def start(plan: dict[str, Any]) -> None:
    """Apply a plan in this process from now on."""
    global SHIM
    SHIM = Shim(plan)
    if os.open is not watched_os_open:
        watch_files()


def watch_files() -> None:
    """Replace the functions that open and change files."""
    for name in CHANGES:
        setattr(os, name, wrap_function(name, getattr(os, name)))
    os.open = watched_os_open
    builtins.open = io.open = watched_open


def install() -> None:
    """Apply the plan in the environment."""
    global SHIM
    plan = json.loads(os.environ.get("TORTURE_PLAN") or "{}")
    SHIM = Shim(plan)
    if plan.get("clock") == "still":
        for name in ("monotonic", "perf_counter", "time", "process_time"):
            now = getattr(time, name)()
            setattr(time, name, lambda now=now: now)
    elif times := plan.get("clock"):
        real, start = time.monotonic, time.monotonic()
        time.monotonic = lambda: start + (real() - start) * times
    if largest := plan.get("largest"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, resource.RLIM_INFINITY))
    if more := plan.get("memory"):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(
            resource.RLIMIT_AS, (pages * resource.getpagesize() + more, resource.RLIM_INFINITY)
        )
    if plan.get("after"):
        watch_opening()
    if SHIM.under:
        watch_files()
