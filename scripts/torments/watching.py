"""What /proc tells of processes: what they hold, what is below them, and what outlives them."""

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

POLL = 0.01  # seconds


def fields(pid: int | str) -> dict[str, int]:
    """What /proc tells of a process, in bytes."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {words[0][:-1]: int(words[1]) * 1024 for line in lines if (words := line.split())[2:] == ["kB"]}


def resident(pid: int) -> int:
    return fields(pid).get("VmRSS", 0)


def below(pid: int) -> list[int]:
    """Its children, and theirs."""
    found = list[int]()
    with suppress(OSError):  # it has ended by now
        for path in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += [int(word) for word in (path / "children").read_text().split()]
    return found + [each for child in found for each in below(child)]


def tree_bytes(pid: int) -> int:
    """What a process and those below it hold: each its own, and what they share of files once."""
    of = [fields(each) for each in (pid, *below(pid))]
    own = sum(each.get("RssAnon", 0) + each.get("RssShmem", 0) for each in of)
    return max(own + max(each.get("RssFile", 0) for each in of), of[0].get("VmHWM", 0))


def adopt() -> None:
    """Have what a process leaves behind come to this one, where it is seen."""
    prctl, become_subreaper = ctypes.CDLL(None).prctl, 36
    prctl(become_subreaper, 1, 0, 0, 0)


def orphans() -> list[int]:
    """What is left of those that have ended; the dead among them are buried."""
    found = below(os.getpid())
    for pid in list(found):
        with suppress(OSError):
            if os.waitpid(pid, os.WNOHANG)[0]:
                found.remove(pid)
    return found


def outlived(seconds: float = 3.0) -> tuple[str, ...]:
    """What is still there a while after the end of what started it; it is ended now."""
    end = time.monotonic() + seconds
    while (found := orphans()) and time.monotonic() < end:
        time.sleep(5 * POLL)
    names = []
    for pid in found:
        with suppress(OSError):
            names.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:120])
            os.kill(pid, signal.SIGKILL)
    while orphans():
        time.sleep(POLL)
    return tuple(names)
