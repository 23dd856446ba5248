"""Compiles all kernels ahead of time, a library for each class of processors, into the package.

    python scripts/build_kernels.py                  every class, and this machine's own
    python scripts/build_kernels.py x86-64-v4 ...    these

Libraries are checked by a hash of the sources: after an edit of a kernel they are not used any more. Needs a
linker.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from llamatrain.compiler import prebuilt
from llamatrain.compiler.cache import COMPILERS
from llamatrain.compiler.inventory import list_compilables
from llamatrain.distributed.cores import count_cores
from llamatrain.platform import cpu


def build_here() -> bytes:
    """Return the library for the processor class of this process."""
    from tqdm import tqdm

    from llamatrain.compiler.emit import emit_object
    from llamatrain.compiler.link import link_objects

    name = cpu.processor().name
    return link_objects(
        [
            emit_object(compilable)
            for compilable in tqdm(list_compilables(), desc=name, disable=None, unit="kernel")
        ],
        name,
    )


def build_class(name: str) -> None:
    """Build a library in a new process, because kernels read the processor class at their import."""
    words = [sys.executable, __file__, "--here", name]
    environment = {**os.environ}
    if name in cpu.CLASSES:
        environment[cpu.CLASS_VARIABLE] = name
    subprocess.run(words, env=environment, check=True)


def build_all(names: list[str]) -> None:
    """Build these libraries, and remove others from the folder."""
    prebuilt.FOLDER.mkdir(exist_ok=True)
    for old in Path(prebuilt.FOLDER).iterdir():
        old.unlink()
    with ThreadPoolExecutor(count_cores()) as pool:
        list(pool.map(build_class, names))
    write_manifest(names)


def write_manifest(names: list[str]) -> None:
    """Write the hashes of sources and libraries."""
    libraries = {
        name: hashlib.sha256((prebuilt.FOLDER / prebuilt.library_filename(name)).read_bytes()).hexdigest()
        for name in names
    }
    compiler = {name: version(name) for name in COMPILERS}
    manifest = {
        "sources": prebuilt.hash_sources(),
        "compiler": compiler,
        "kernels": [compilable.qualified_name for compilable in list_compilables()],
    }
    text = json.dumps({**manifest, "libraries": libraries}, indent=1)
    (prebuilt.FOLDER / prebuilt.MANIFEST).write_text(text + "\n")


def main() -> None:
    """Build the libraries and print their sizes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = {*cpu.CLASSES, cpu.processor().name}
    parser.add_argument("names", nargs="*", metavar="CLASS", help=", ".join(sorted(known)))
    parser.add_argument("--here", metavar="CLASS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        (prebuilt.FOLDER / prebuilt.library_filename(args.here)).write_bytes(build_here())
        return
    names = sorted(args.names or known)
    if unknown := {*names} - known:
        parser.error(f"unknown class {', '.join(sorted(unknown))}; known are {', '.join(sorted(known))}")
    build_all(names)
    for name in names:
        size = (prebuilt.FOLDER / prebuilt.library_filename(name)).stat().st_size
        print(f"{name}: {size:,} bytes, {len(list_compilables())} kernels")


if __name__ == "__main__":
    main()
