"""Links object files to a shared library with the system's linker, if there is one."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path


class LinkError(Exception):
    """The linker failed."""


@cache
def find_linker() -> str | None:
    """Return the path of the linker, if its libraries can be loaded from memory."""
    return shutil.which("ld") or shutil.which("ld.lld") if sys.platform == "linux" else None


def link_objects(objects: Sequence[bytes], name: str = "kernels") -> bytes:
    """Link objects to one library; equal objects in equal order give equal bytes."""
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
    """Return a library if the object can be linked, else the object."""
    try:
        return link_objects([code]) if find_linker() else code
    except (OSError, LinkError):  # the disk is full, or the linker does not know these options
        return code
