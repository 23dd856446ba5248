"""Makes a wheel with the kernels of every class of processors in it, for all Pythons that the project runs on.

    python scripts/build_wheel.py [FOLDER]           into this folder, else dist; compiles what is not built yet

What has no libraries in it, as `pip install .` makes it, is a pure wheel, and compiles kernels when they are first used.
Needs a linker, and pip.
"""

import argparse
import hashlib
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import build_kernels

from llamatrain.compiler import prebuilt
from llamatrain.platform import cpu

ROOT = Path(__file__).resolve().parent.parent
MOST = 8 << 20  # bytes of a wheel
GLIBC = "manylinux_2_17"  # the libraries name nothing that a C library of that age lacks


def is_built() -> bool:
    """Whether there is a library of each class, of these sources, as its hash says."""
    try:
        manifest = json.loads((prebuilt.FOLDER / prebuilt.MANIFEST).read_text())
        files = {
            name: (prebuilt.FOLDER / prebuilt.library_filename(name)).read_bytes() for name in cpu.CLASSES
        }
        made_of, expected = manifest["sources"], manifest["libraries"].items()
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return False
    hashes = {name: hashlib.sha256(file).hexdigest() for name, file in files.items()}
    return bool(made_of == prebuilt.hash_sources() and hashes.items() <= expected)


def build(folder: Path) -> Path:
    if not is_built():
        build_kernels.build_all(sorted(cpu.CLASSES))
    with tempfile.TemporaryDirectory() as scratch:
        source, made = Path(scratch, "source"), Path(scratch, "made")
        package = source / "llamatrain"
        shutil.copytree(
            ROOT / "llamatrain", package, ignore=shutil.ignore_patterns("__pycache__", "libraries")
        )
        shutil.copytree(prebuilt.FOLDER, package / "machine" / "libraries")
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
        tag = f"--build-option=--plat-name={GLIBC}_{platform.machine()}"
        words = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            f"--config-settings={tag}",
            "-w",
            str(made),
            str(source),
        ]
        subprocess.run(words, check=True)
        (wheel,) = made.glob("*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(wheel, folder))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist")
    wheel = build(parser.parse_args().folder)
    size = wheel.stat().st_size
    print(f"{wheel}: {size:,} bytes")
    if size > MOST:
        raise SystemExit(f"error: a wheel has at most {MOST:,} bytes")


if __name__ == "__main__":
    main()
