"""What is put under the command in its own process: file operations that are counted, and one before which something happens.

The plan is JSON in the environment. `under`: folders whose operations count; `at`: the number of the one before which `do`
happens: kill, full, count, move, remove or any of the ways in which a file can change; `bytes`: how many may be written;
`part`: the share of that one write that still finds room; `memory`: bytes that may be mapped beside what is.
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


class NoRoom(OSError):
    """For more than so many bytes."""

    def __init__(self, room: int) -> None:
        super().__init__(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room = room


class Shim:
    """Counts what is done under some folders, and strikes when it is time."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.under = tuple(os.path.realpath(each) for each in plan.get("under", ()))
        self.count = self.written = 0
        self.struck = self.busy = False

    def concerns(self, place: Any) -> bool:
        try:
            if isinstance(place, int):
                path = str(Path(f"/proc/self/fd/{place}").readlink())
            else:
                path = os.path.realpath(Path(os.fsdecode(place)).parent)
        except (OSError, TypeError, ValueError):
            return False
        return any(path == each or path.startswith(each + os.sep) for each in self.under)

    def tick(self, place: Any, size: int = 0) -> None:
        """Before each operation."""
        if self.busy or not self.concerns(place):
            return
        self.count += 1
        self.written += size
        if counter := self.plan.get("count"):
            self.tell(counter, os.O_TRUNC, self.count)
        if sizes := self.plan.get("sizes"):
            self.tell(sizes, os.O_APPEND, size)
        full = self.plan.get("do") == "full"
        if (
            full
            and size
            and (self.count >= self.plan["at"] if "at" in self.plan else self.written > self.plan["bytes"])
        ):
            raise NoRoom(self.room(size))
        if self.plan.get("do") == "deny":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(place))
        if self.count == self.plan.get("at") and not full and not self.struck:
            self.struck = self.busy = True
            STRIKES[self.plan["do"]](self.plan)
            self.busy = False

    def room(self, size: int) -> int:
        """For how much of a write there is still some."""
        if "bytes" in self.plan:
            return max(0, int(self.plan["bytes"]) - self.written + size)
        return int(size * self.plan.get("part", 0)) if self.count == self.plan["at"] else 0

    def tell(self, place_of: str, manner: int, number: int) -> None:
        self.busy = True
        place = real_os_open(place_of, os.O_WRONLY | os.O_CREAT | manner)
        real_write(place, f"{number}\n".encode())
        os.close(place)
        self.busy = False


real_write = os.write


class Watched(io.FileIO):
    """A file whose writes are counted."""

    def write(self, data: Any) -> int:
        try:
            SHIM.tick(self.fileno(), memoryview(data).nbytes)
        except NoRoom as error:
            if not error.room:
                raise
            return super().write(memoryview(data).cast("B")[: error.room])
        return super().write(data)

    def truncate(self, size: int | None = None) -> int:
        SHIM.tick(self.fileno())
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
    if not set(mode) & set("wax+") or not SHIM.concerns(file):
        return real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
    if not isinstance(file, int):
        SHIM.tick(file, 1 if SHIM.plan.get("do") == "deny" else 0)
    raw = Watched(file, mode.replace("b", "").replace("t", ""), closefd, opener)
    if "b" in mode and buffering == 0:
        return raw
    buffered: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
    if "b" in mode:
        return buffered
    return io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)


def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(place: Any, *more: Any, **named: Any) -> Any:
        size = memoryview(more[0]).nbytes if name in ("write", "pwrite") and more else 0
        concerned = more[0] if name in ("rename", "replace", "link", "symlink") and more else place
        SHIM.tick(concerned, size)
        return real(place, *more, **named)

    return call


def wrapped_os_open(path: Any, flags: int, *more: Any, **named: Any) -> int:
    if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
        SHIM.tick(path)
    return real_os_open(path, flags, *more, **named)


def watch_opening() -> None:
    """Any file that is opened or mapped counts, once the input has been opened for the first time."""
    seen = False

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event not in ("open", "mmap.__new__", "os.rename", "os.remove", "os.listdir", "os.scandir"):
            return
        path = arguments[0] if arguments else None
        seen = seen or (
            event == "open"
            and isinstance(path, str | bytes)
            and os.fsdecode(path).endswith(SHIM.plan["after"])
        )
        if seen and not SHIM.busy:
            SHIM.count += 1
            if counter := SHIM.plan.get("count"):
                SHIM.tell(counter, os.O_TRUNC, SHIM.count)
            if SHIM.count == SHIM.plan.get("at") and not SHIM.struck:
                SHIM.struck = SHIM.busy = True
                STRIKES[SHIM.plan["do"]](SHIM.plan)
                SHIM.busy = False

    sys.addaudithook(hook)


# ---- what can happen -------------------------------------------------------


def die(_: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def change(plan: dict[str, Any]) -> None:
    """A file becomes another in one of the ways in which that happens."""
    path, manner = Path(plan["input"]), plan["manner"]
    other = Path(plan["other"]) if plan.get("other") else path
    if manner == "replaced":
        copy = path.with_name(path.name + ".copy")
        shutil.copyfile(other, copy)
        real_replace(copy, path)
    elif manner == "overwritten":
        with real_open(path, "r+b") as file:
            file.truncate(0)
            file.write(other.read_bytes())
    elif manner in ("halved", "emptied"):
        with real_open(path, "r+b") as file:
            file.truncate(path.stat().st_size // 2 if manner == "halved" else 0)
    elif manner == "unlinked":
        path.unlink()
    elif manner == "edited":  # in place, of the same size: every float from the middle on is no number
        size = path.stat().st_size
        with real_open(path, "r+b") as file:
            file.seek(size // 8 * 4)
            file.write(b"\xff" * (size - size // 8 * 4))


def move(plan: dict[str, Any]) -> None:
    real_rename(plan["folder"], plan["folder"] + "-moved")


def remove(plan: dict[str, Any]) -> None:
    shutil.rmtree(plan["folder"])


def delete(plan: dict[str, Any]) -> None:
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


def begin(plan: dict[str, Any]) -> None:
    """Do so from now on, in this process."""
    global SHIM
    SHIM = Shim(plan)
    if os.open is not wrapped_os_open:
        watch_files()


def watch_files() -> None:
    for name in CHANGES:
        setattr(os, name, wrapped(name, getattr(os, name)))
    os.open = wrapped_os_open
    builtins.open = io.open = watched_open


def install() -> None:
    """Do as the environment says."""
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
