"""Reads from /proc what processes hold, which are their children, and which survive them."""

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

POLL = 0.01  # seconds


def read_status(pid: int | str) -> dict[str, int]:
    """Return the sizes in a process's status, in bytes."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {words[0][:-1]: int(words[1]) * 1024 for line in lines if (words := line.split())[2:] == ["kB"]}


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    return read_status(pid).get("VmRSS", 0)


def list_descendants(pid: int) -> list[int]:
    """Return the children of a process, and theirs."""
    pids = list[int]()
    with suppress(OSError):  # it has ended by now
        for path in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                pids += [int(word) for word in (path / "children").read_text().split()]
    return pids + [pid for child in pids for pid in list_descendants(child)]


def tree_bytes(pid: int) -> int:
    """Return the memory of a process and its descendants; pages of files that they share count once."""
    statuses = [read_status(process) for process in (pid, *list_descendants(pid))]
    own = sum(status.get("RssAnon", 0) + status.get("RssShmem", 0) for status in statuses)
    shared = max(status.get("RssFile", 0) for status in statuses)
    return max(own + shared, statuses[0].get("VmHWM", 0))


def become_subreaper() -> None:
    """Make this process the parent of orphans among its descendants, so that it sees them."""
    prctl = ctypes.CDLL(None).prctl
    set_child_subreaper = 36
    prctl(set_child_subreaper, 1, 0, 0, 0)


def reap_orphans() -> list[int]:
    """Return the descendants that still run, and reap the ones that have ended."""
    pids = list_descendants(os.getpid())
    for pid in list(pids):
        with suppress(OSError):
            if os.waitpid(pid, os.WNOHANG)[0]:
                pids.remove(pid)
    return pids


def kill_survivors(seconds: float = 3.0) -> tuple[str, ...]:
    """Kill the descendants that still run after some seconds, and return their command lines."""
    end = time.monotonic() + seconds
    while (pids := reap_orphans()) and time.monotonic() < end:
        time.sleep(5 * POLL)
    names = []
    for pid in pids:
        with suppress(OSError):
            names.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:120])
            os.kill(pid, signal.SIGKILL)
    while reap_orphans():
        time.sleep(POLL)
    return tuple(names)
