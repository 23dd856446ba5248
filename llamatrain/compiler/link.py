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
def find_linker() -> str | None:
    """Of the system, if it is one whose libraries are loaded from memory."""
    return shutil.which("ld") or shutil.which("ld.lld") if sys.platform == "linux" else None


def link_objects(objects: Sequence[bytes], name: str = "kernels") -> bytes:
    """One library; the same bytes for the same objects in the same order."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{index}.o") for index in range(len(objects))]
        for file, code in zip(files, objects, strict=True):
            file.write_bytes(code)
        out = Path(folder, f"{name}.so")
        options = [
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
        command = [str(find_linker()), *options, *(file.name for file in files)]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if result.returncode:
            raise LinkError(f"{find_linker()} ended with {result.returncode}: {result.stderr.strip()[:500]}")
        return out.read_bytes()


def link_if_possible(code: bytes) -> bytes:
    """An object as it is kept: linked, where that can be done."""
    try:
        return link_objects([code]) if find_linker() else code
    except (OSError, LinkError):  # there is no room for files, or the linker is of another kind
        return code
