"""Kernels that were compiled before, for tests of what becomes of a few of them: compiling all of them takes half a minute."""

import os
import shutil
from pathlib import Path

import llamatrain.kernels.cpu.device  # noqa: F401  brings the bricks
from llamatrain.compiler import prebuilt
from llamatrain.compiler.cache import cache_key, code_cache
from llamatrain.compiler.declare import SharedKernel
from llamatrain.compiler.parallel import precompile
from llamatrain.platform.cache_dir import NAME


def without_libraries(folder: Path, **more: str) -> dict[str, str]:
    """The environment of a process that compiles what it does not find in this cache."""
    return {
        **os.environ,
        prebuilt.LIBRARIES_VARIABLE: str(folder / "no libraries"),
        "LLAMATRAIN_CACHE": str(folder),
        **more,
    }


def warm(place: Path, *without: str) -> Path:
    """The folder of a cache at this place: what this machine has, and all bricks, less the functions that are named."""
    precompile(SharedKernel.instances)
    folder = place / NAME / cache_key()
    folder.mkdir(parents=True, exist_ok=True)
    if code_cache.store.folder and code_cache.store.folder.exists():
        shutil.copytree(code_cache.store.folder, folder, dirs_exist_ok=True)
    for name, file in code_cache.store.in_memory.items():
        (folder / name).write_bytes(file)
    for path in [path for path in folder.iterdir() if path.name.startswith(without)]:
        path.unlink()
    return folder
