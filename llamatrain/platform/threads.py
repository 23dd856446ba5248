"""Threads that begin, or are said not to: where there is no memory for one, Python's own start waits for it for ever."""

import mmap
import threading

START_BYTES = 1 << 20  # bytes, more than Python asks the system for before a thread runs code of its own


def start_thread(thread: threading.Thread) -> None:
    try:
        mmap.mmap(-1, START_BYTES).close()
        thread.start()
    except (OSError, RuntimeError):
        raise MemoryError("for one more thread") from None
