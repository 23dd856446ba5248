"""Prints the final message of a failing process.

Its own streams may be redirected, since only rank 0 prints.
"""

import sys
import traceback
from contextlib import suppress
from typing import TextIO

from llamatrain.config.messages import shorten_line
from llamatrain.distributed.single import EXIT_RETRY, ExitStatus
from llamatrain.platform.escape import make_printable
from llamatrain.platform.terminal import wrap_line

_streams = list[TextIO]()


def set_stream(stream: TextIO) -> None:
    """Set the stream for final messages, whatever standard error becomes later."""
    _streams[:] = [stream]


def print_error(message: str) -> None:
    """Print an error message."""
    write_text(
        wrap_line(f"error: {shorten_line(make_printable(message, get_encoding()))}", get_stream()) + "\n"
    )


def write_text(text: str) -> None:
    """Write text and ignore a closed stream."""
    with suppress(OSError, ValueError):  # closed
        get_stream().write(text)
        get_stream().flush()


def get_encoding() -> str:
    """Return the encoding of the stream."""
    return getattr(get_stream(), "encoding", None) or "utf-8"


def get_stream() -> TextIO:
    """Return the stream for final messages."""
    return _streams[0] if _streams else sys.stderr


def exit_status_for(error: Exception) -> ExitStatus:
    """Return the exit status for an unexpected error: lost processes, or a bug, whose traceback is printed."""
    message = " ".join(str(error).split())
    if type(error).__module__.startswith("mpi4py"):
        return ExitStatus(
            f"lost the connection to the other processes ({message})", EXIT_RETRY, peer_lost=True
        )
    write_text("".join(traceback.format_exception(error)))
    return ExitStatus(f"{type(error).__name__}: {message}", 1)
