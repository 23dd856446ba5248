"""Recognizes names of files that are not paths: `ollama:NAME`, `hf:OWNER/NAME` and `https://...`.

A file or folder that exists under such a name is used as it is. `C:\\x` is a path, since schemes are listed.
"""

import os
import re
from pathlib import Path
from typing import Literal

Use = Literal["model", "adapter", "data"]  # what a file is needed for
SCHEMES = ("ollama", "hf", "http", "https")
NAME = re.compile(rf"({'|'.join(SCHEMES)}):(.*)", re.DOTALL)


def remote_name(path: str | Path) -> str | None:
    """Return the name if a path is one that has to be resolved, else None.

    A `Path` has one slash in place of the two of an address, and on Windows backslashes.
    """
    match = NAME.fullmatch(str(path))
    if not match or os.path.exists(path):  # noqa: PTH110 - False for a name that is too long for a path
        return None
    scheme, rest = match.groups()
    if isinstance(path, Path):
        rest = rest.replace("\\", "/")
    if scheme in ("http", "https"):
        return f"{scheme}://{rest.lstrip('/')}"
    return f"{scheme}:{rest}"


def is_model_name(name: str) -> bool:
    """Return True if a remote name is one of a model, and not of data or of an address of unknown content."""
    if name.startswith("ollama:"):
        return True
    file = re.split(r"[?#@]", name)[0]
    if name.startswith("hf:"):
        return not file.startswith("hf:datasets/") and (file.count("/") == 1 or file.endswith(".gguf"))
    return file.endswith(".gguf")
