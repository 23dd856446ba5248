"""An object file to a shared library, by the linker of the system; where there is none it stays what it is."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path


class LinkError(Exception):
    """What the linker said."""


@cache
def linker() -> str | None:
    """Of the system, if it is one whose libraries are loaded from memory."""
    return shutil.which("ld") or shutil.which("ld.lld") if sys.platform == "linux" else None


def linked(objects: Sequence[bytes], name: str = "kernels") -> bytes:
    """One library; the same bytes for the same objects in the same order."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{at}.o") for at in range(len(objects))]
        for file, code in zip(files, objects, strict=True):
            file.write_bytes(code)
        out = Path(folder, f"{name}.so")
        how = [
            "-shared",
            "-Bsymbolic",
            "--build-id=none",
            "-z",
            "noexecstack",
            "-z",
            "max-page-size=4096",
            "-s",
            "-o",
            out.name,
        ]
        words = [str(linker()), *how, *(file.name for file in files)]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LinkError(f"{linker()} ended with {done.returncode}: {done.stderr.strip()[:500]}")
        return out.read_bytes()


def loadable(code: bytes) -> bytes:
    """An object as it is kept: linked, where that can be done."""
    try:
        return linked([code]) if linker() else code
    except (OSError, LinkError):  # there is no room for files, or the linker is of another kind
        return code
