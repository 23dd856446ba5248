"""Compiles all kernels ahead of time, a library for each class of processors, into the package.

    python scripts/build_kernels.py                          every class of this platform, and this machine's own
    python scripts/build_kernels.py x86-64-v4 ...            these
    python scripts/build_kernels.py --platform macos-arm64   every class of another platform
    python scripts/build_kernels.py --platform all           every class of every platform

Libraries of another platform go to build/kernels/PLATFORM, or with --folder to FOLDER/PLATFORM; to link them,
Zig is needed (`pip install ziglang`). Libraries are checked by a hash of the sources: after an edit of a kernel
they are not used any more. Needs a linker.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from llamatrain.compiler import prebuilt
from llamatrain.compiler.cache import COMPILERS
from llamatrain.compiler.cross_link import cross_link, find_zig
from llamatrain.compiler.inventory import list_compilables
from llamatrain.distributed.cores import count_cores
from llamatrain.platform import cpu, systems

ROOT = Path(__file__).resolve().parent.parent
OTHERS = ROOT / "build" / "kernels"  # libraries of other platforms
ALL = "all"


def build_here() -> bytes:
    """Return the library for the processor class and the platform of this process."""
    from tqdm import tqdm

    from llamatrain.compiler.emit import emit_object
    from llamatrain.compiler.link import link_objects

    name, compilables = cpu.processor().name, list_compilables()
    objects = [
        emit_object(compilable) for compilable in tqdm(compilables, desc=name, disable=None, unit="kernel")
    ]
    target = systems.target_platform()
    if target and target != systems.host_platform():
        return cross_link(objects, [each.symbol for each in compilables], target, name)
    return link_objects(objects, name)


def library_path(folder: Path, name: str, target: systems.Platform | None) -> Path:
    """Return the path of a class's library for a platform."""
    return folder / prebuilt.library_filename(name, target.system if target else sys.platform)


def build_class(name: str, target: systems.Platform | None = None, folder: Path | None = None) -> None:
    """Build a library in a new process, because kernels read the processor class at their import."""
    words = [sys.executable, __file__, "--here", name, "--folder", str(folder or prebuilt.FOLDER)]
    environment = {**os.environ}
    if name in cpu.CLASSES:
        environment[cpu.CLASS_VARIABLE] = name
    if target:
        environment[systems.PLATFORM_VARIABLE] = target.name
    subprocess.run(words, env=environment, check=True)


def build_all(names: list[str], target: systems.Platform | None = None, folder: Path | None = None) -> None:
    """Build these libraries of a platform, by default this one's, and remove others from the folder."""
    target, folder = target or systems.host_platform(), folder or prebuilt.FOLDER
    if target and target != systems.host_platform() and not find_zig():
        sys.exit(
            f"error: libraries of {target.name} are linked with Zig, which is missing; pip install ziglang"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    with ThreadPoolExecutor(count_cores()) as pool:
        list(pool.map(lambda name: build_class(name, target, folder), names))
    write_manifest(names, target, folder)


def write_manifest(
    names: list[str], target: systems.Platform | None = None, folder: Path | None = None
) -> None:
    """Write the hashes of sources and libraries."""
    target, folder = target or systems.host_platform(), folder or prebuilt.FOLDER
    libraries = {
        name: hashlib.sha256(library_path(folder, name, target).read_bytes()).hexdigest() for name in names
    }
    compiler = {name: version(name) for name in COMPILERS}
    manifest = {
        "sources": prebuilt.hash_sources(),
        "compiler": compiler,
        "kernels": [compilable.qualified_name for compilable in list_compilables()],
        "platform": target.name if target else sys.platform,
    }
    text = json.dumps({**manifest, "libraries": libraries}, indent=1)
    (folder / prebuilt.MANIFEST).write_text(text + "\n")


def default_folder(target: systems.Platform) -> Path:
    """Return the folder of a platform's libraries: for this platform, that of the package."""
    return prebuilt.FOLDER if target == systems.host_platform() else OTHERS / target.name


def build_platform(target: systems.Platform, names: list[str], folder: Path) -> None:
    """Build the libraries of a platform and print their sizes."""
    start = time.perf_counter()
    build_all(names, target, folder)
    for name in names:
        size = library_path(folder, name, target).stat().st_size
        print(f"{target.name} {name}: {size:,} bytes, {len(list_compilables())} kernels")
    print(f"{target.name}: {time.perf_counter() - start:.0f} s, in {folder}")


def build_here_and_print(names: list[str]) -> None:
    """Build libraries of this platform into the package and print their sizes."""
    build_all(names)
    for name in names:
        size = library_path(prebuilt.FOLDER, name, systems.host_platform()).stat().st_size
        print(f"{name}: {size:,} bytes, {len(list_compilables())} kernels")


def main() -> None:
    """Build the libraries and print their sizes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    host = systems.host_platform()
    known = {*(host.classes if host else ()), cpu.processor().name}
    parser.add_argument("names", nargs="*", metavar="CLASS", help=", ".join(sorted(known)))
    parser.add_argument("--platform", metavar="PLATFORM", help=", ".join([*systems.PLATFORMS, ALL]))
    parser.add_argument("--folder", type=Path, help="folder of the libraries")
    parser.add_argument("--here", metavar="CLASS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        folder = args.folder or prebuilt.FOLDER
        library_path(folder, args.here, systems.target_platform()).write_bytes(build_here())
        return
    if args.platform in (None, *([host.name] if host else [])) and not args.folder:
        names = sorted(args.names or known)
        if unknown := {*names} - known:
            parser.error(f"unknown class {', '.join(sorted(unknown))}; known are {', '.join(sorted(known))}")
        build_here_and_print(names)
        return
    if args.platform not in (*systems.PLATFORMS, ALL):
        known_platforms = ", ".join([*systems.PLATFORMS, ALL])
        parser.error(f"unknown platform {args.platform}; known are {known_platforms}")
    for target in systems.PLATFORMS.values() if args.platform == ALL else [systems.PLATFORMS[args.platform]]:
        names = sorted(args.names or target.classes)
        if unknown := {*names} - {*target.classes}:
            parser.error(
                f"unknown class {', '.join(sorted(unknown))} of {target.name}; known are {', '.join(target.classes)}"
            )
        folder = args.folder / target.name if args.folder else default_folder(target)
        build_platform(target, names, folder)


if __name__ == "__main__":
    main()
