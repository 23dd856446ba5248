"""Builds wheels with kernels for every class of processors of a platform, for all supported Pythons.

    python scripts/build_wheel.py [FOLDER]             into this folder, by default dist
    python scripts/build_wheel.py --platform all       a wheel for each platform that kernels are built for

Missing kernels are compiled. A wheel without libraries, as `pip install .` builds it, compiles kernels when
they are first used. Equal sources give equal bytes: entries are sorted and have the date SOURCE_DATE_EPOCH.
Needs a linker and pip.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from datetime import UTC, datetime
from pathlib import Path

import build_kernels

from llamatrain.compiler import prebuilt
from llamatrain.platform import systems

ROOT = Path(__file__).resolve().parent.parent
MAX_BYTES = 10 << 20  # of a wheel
DATE_VARIABLE, OLDEST = "SOURCE_DATE_EPOCH", 315532800  # 1980, where the dates of zip files begin


def is_built(target: systems.Platform | None = None) -> bool:
    """Return whether the libraries of all classes of a platform exist and have the hashes of these sources."""
    target = target or systems.host_platform()
    if not target:
        return False
    folder = build_kernels.default_folder(target)
    try:
        manifest = json.loads((folder / prebuilt.MANIFEST).read_text())
        files = {
            name: build_kernels.library_path(folder, name, target).read_bytes() for name in target.classes
        }
        sources = manifest["sources"]
        expected = manifest["libraries"].items()
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return False
    hashes = {name: hashlib.sha256(file).hexdigest() for name, file in files.items()}
    return bool(sources == prebuilt.hash_sources() and hashes.items() <= expected)


def build_wheel(folder: Path, target: systems.Platform) -> Path:
    """Build the wheel of a platform into a folder and return its path."""
    libraries = build_kernels.default_folder(target)
    if not is_built(target):
        build_kernels.build_all(sorted(target.classes), target, libraries)
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "source")
        wheels = Path(scratch, "wheels")
        package = source / "llamatrain"
        shutil.copytree(
            ROOT / "llamatrain", package, ignore=shutil.ignore_patterns("__pycache__", "libraries")
        )
        shutil.copytree(libraries, package / "compiler" / "libraries")
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
        tag = f"--build-option=--plat-name={target.wheel_tag}"
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
        return rewrite_wheel(wheel, folder / wheel.name)


def rewrite_wheel(wheel: Path, out: Path) -> Path:
    """Copy a wheel with sorted entries that all have one date and the same permissions."""
    date = max(OLDEST, int(os.environ.get(DATE_VARIABLE, OLDEST)))
    moment = datetime.fromtimestamp(date, UTC)
    fields = (moment.year, moment.month, moment.day, moment.hour, moment.minute, moment.second)
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(out, "w") as new:
        # the metadata come last, as the format recommends
        for name in sorted(old.namelist(), key=lambda name: (".dist-info/" in name, name)):
            entry = zipfile.ZipInfo(name, fields)
            entry.compress_type, entry.create_system = zipfile.ZIP_DEFLATED, 3
            entry.external_attr = 0o100644 << 16
            new.writestr(entry, old.read(name), compresslevel=9)
    return out


def main() -> None:
    """Build the wheels and check their sizes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    host = systems.host_platform()
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist")
    parser.add_argument(
        "--platform",
        choices=[*systems.PLATFORMS, build_kernels.ALL],
        default=host.name if host else None,
        required=host is None,
    )
    args = parser.parse_args()
    every = args.platform == build_kernels.ALL
    for target in systems.PLATFORMS.values() if every else [systems.PLATFORMS[args.platform]]:
        wheel = build_wheel(args.folder, target)
        size = wheel.stat().st_size
        print(f"{wheel}: {size:,} bytes")
        if size > MAX_BYTES:
            raise SystemExit(f"error: the wheel must have at most {MAX_BYTES:,} bytes (got {size:,})")


if __name__ == "__main__":
    main()
