"""Keeps models of transformers that were imported, so that a folder can be used like a GGUF file."""

import hashlib
import os
from pathlib import Path

import llamatrain
from llamatrain.errors import FileError
from llamatrain.importing.checkpoint import open_checkpoint
from llamatrain.importing.write import import_folder
from llamatrain.io.disk_space import check_disk_space
from llamatrain.platform.cache_dir import writable_cache_dir
from llamatrain.platform.cache_prune import MODEL_FOLDER

WEIGHTS, OTHERS = (".safetensors",), (".json", ".model", ".jinja", ".txt")


def cached_import(folder: Path) -> Path:
    """Return the GGUF file of a folder with a model of transformers; it is written if it is not in the cache."""
    cache = writable_cache_dir(MODEL_FOLDER)
    if cache is None:
        raise FileError(
            f"{folder}: there is no folder for a cache; convert the model with `llamatrain import`",
            code="unwritable-file",
        )
    checkpoint = open_checkpoint(folder)
    path = cache / f"{folder.resolve().name}-{fingerprint(folder)}.gguf"
    if path.is_file():
        os.utime(path)
        return path
    cache.mkdir(parents=True, exist_ok=True)
    import_folder(checkpoint, path, None, check=check_disk_space)
    return path


def fingerprint(folder: Path) -> str:
    """Return a text that changes when the files of a folder do, or the version of llamatrain."""
    found = [llamatrain.__version__, os.fspath(folder.resolve())]
    for path in sorted(folder.iterdir()):
        if path.suffix in (*WEIGHTS, *OTHERS) and path.is_file():
            status = path.stat()
            found.append(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}")
    return hashlib.sha256("\0\0".join(found).encode("utf-8", "surrogateescape")).hexdigest()[:16]
