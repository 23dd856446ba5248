"""Builds a wheel with kernels for every class of processors, for all supported Pythons.

    python scripts/build_wheel.py [FOLDER]      into this folder, by default dist

Missing kernels are compiled. A wheel without libraries, as `pip install .` builds it, compiles kernels when
they are first used. Needs a linker and pip.
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
MAX_BYTES = 8 << 20  # of a wheel
GLIBC = "manylinux_2_17"  # the libraries need nothing newer


def is_built() -> bool:
    """Return whether the libraries of all classes exist and have the hashes of these sources."""
    try:
        manifest = json.loads((prebuilt.FOLDER / prebuilt.MANIFEST).read_text())
        files = {
            name: (prebuilt.FOLDER / prebuilt.library_filename(name)).read_bytes() for name in cpu.CLASSES
        }
        sources = manifest["sources"]
        expected = manifest["libraries"].items()
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return False
    hashes = {name: hashlib.sha256(file).hexdigest() for name, file in files.items()}
    return bool(sources == prebuilt.hash_sources() and hashes.items() <= expected)


def build_wheel(folder: Path) -> Path:
    """Build the wheel into a folder and return its path."""
    if not is_built():
        build_kernels.build_all(sorted(cpu.CLASSES))
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "source")
        wheels = Path(scratch, "wheels")
        package = source / "llamatrain"
        shutil.copytree(
            ROOT / "llamatrain", package, ignore=shutil.ignore_patterns("__pycache__", "libraries")
        )
        shutil.copytree(prebuilt.FOLDER, package / "compiler" / "libraries")
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
            str(wheels),
            str(source),
        ]
        subprocess.run(words, check=True)
        (wheel,) = wheels.glob("*.whl")
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(wheel, folder))


def main() -> None:
    """Build the wheel and check its size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist")
    wheel = build_wheel(parser.parse_args().folder)
    size = wheel.stat().st_size
    print(f"{wheel}: {size:,} bytes")
    if size > MAX_BYTES:
        raise SystemExit(f"error: the wheel must have at most {MAX_BYTES:,} bytes (got {size:,})")


if __name__ == "__main__":
    main()
