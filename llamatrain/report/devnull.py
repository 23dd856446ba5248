"""Where output goes that nobody reads."""

import os
from typing import Literal, TextIO


def open_null(mode: Literal["r", "w"] = "w") -> TextIO:
    """A stream for the rest of the process: nothing comes out of it, and nothing is kept that would have to be closed."""
    return open(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8", closefd=False)
