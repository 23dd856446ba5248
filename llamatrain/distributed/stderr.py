"""The last words of a process whose own streams may lead nowhere, since only the first of several prints."""

import sys
import traceback
from contextlib import suppress
from typing import TextIO

from llamatrain.config.messages import readable
from llamatrain.distributed.single import AGAIN, ExitStatus
from llamatrain.platform.escape import printable
from llamatrain.platform.terminal import folded

_kept = list[TextIO]()


def keep(stream: TextIO) -> None:
    """Where last words go from now on, whatever standard error is."""
    _kept[:] = [stream]


def complain(words: str) -> None:
    tell(folded(f"error: {readable(printable(words, encoding()))}", stream()) + "\n")


def tell(text: str) -> None:
    with suppress(OSError, ValueError):  # nobody reads it
        stream().write(text)
        stream().flush()


def encoding() -> str:
    return getattr(stream(), "encoding", None) or "utf-8"


def stream() -> TextIO:
    return _kept[0] if _kept else sys.stderr


def fault(error: Exception) -> ExitStatus:
    """What no user can have meant: that the others cannot be reached any more, or a fault of the program, with its traceback."""
    words = " ".join(str(error).split())
    if type(error).__module__.startswith("mpi4py"):
        return ExitStatus(f"the other processes cannot be reached any more ({words})", AGAIN, lost=True)
    tell("".join(traceback.format_exception(error)))
    return ExitStatus(f"{type(error).__name__}: {words}", 1)
