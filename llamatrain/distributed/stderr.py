"""Prints the final message of a failing process, whose own streams may be redirected, since only rank 0
prints.
"""

import sys
import traceback
from contextlib import suppress
from typing import TextIO

from llamatrain.config.messages import readable
from llamatrain.distributed.single import AGAIN, ExitStatus
from llamatrain.platform.escape import make_printable
from llamatrain.platform.terminal import wrap_line

_kept = list[TextIO]()


def keep(stream: TextIO) -> None:
    """Set the stream for final messages, whatever standard error becomes later."""
    _kept[:] = [stream]


def complain(words: str) -> None:
    """Print an error message."""
    tell(wrap_line(f"error: {readable(make_printable(words, encoding()))}", stream()) + "\n")


def tell(text: str) -> None:
    """Write text and ignore a closed stream."""
    with suppress(OSError, ValueError):  # nobody reads it
        stream().write(text)
        stream().flush()


def encoding() -> str:
    """Return the encoding of the stream."""
    return getattr(stream(), "encoding", None) or "utf-8"


def stream() -> TextIO:
    """Return the stream for final messages."""
    return _kept[0] if _kept else sys.stderr


def fault(error: Exception) -> ExitStatus:
    """Return the exit status for an unexpected error: lost processes, or a bug, whose traceback is printed."""
    words = " ".join(str(error).split())
    if type(error).__module__.startswith("mpi4py"):
        return ExitStatus(f"the other processes cannot be reached any more ({words})", AGAIN, lost=True)
    tell("".join(traceback.format_exception(error)))
    return ExitStatus(f"{type(error).__name__}: {words}", 1)
