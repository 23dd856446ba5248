"""Starts threads without hanging: without memory for a thread, Python's own start waits forever."""

import mmap
import threading

START_BYTES = 1 << 20  # bytes; Python allocates less before a thread runs its own code


def start_thread(thread: threading.Thread) -> None:
    """Start a thread, or raise MemoryError."""
    try:
        mmap.mmap(-1, START_BYTES).close()
        thread.start()
    except (OSError, RuntimeError):
        raise MemoryError("for one more thread") from None
