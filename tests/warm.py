"""Kernels that were compiled before, for tests of what becomes of a few of them: compiling all of them takes a minute."""

import shutil
from pathlib import Path

import llamatrain.kernels.cpu.backend  # noqa: F401  brings the bricks
from llamatrain.machine.cachefolder import NAME
from llamatrain.machine.entry import Brick
from llamatrain.machine.jit import compiler
from llamatrain.machine.native import cache_key


def warm(place: Path, *without: str) -> Path:
    """The folder of a cache at this place: what this machine has, and all bricks, less the functions that are named."""
    for brick in Brick.made:
        brick.link()
    folder = place / NAME / cache_key()
    folder.mkdir(parents=True, exist_ok=True)
    if compiler.shelf.folder and compiler.shelf.folder.exists():
        shutil.copytree(compiler.shelf.folder, folder, dirs_exist_ok=True)
    for name, file in compiler.shelf.loose.items():
        (folder / name).write_bytes(file)
    for path in [path for path in folder.iterdir() if path.name.startswith(without)]:
        path.unlink()
    return folder
