"""The null device as a stream."""

import os
from typing import Literal, TextIO


def open_null(mode: Literal["r", "w"] = "w") -> TextIO:
    """Return a null stream for the rest of the process, which needs no closing."""
    return open(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8", closefd=False)
