"""Reads an adapter of any format, recognized by its content."""

from pathlib import Path

from llamatrain.adapters import gguf, legacy_bin, legacy_checkpoint, peft
from llamatrain.adapters.adapter import Adapter
from llamatrain.config.not_found import missing_adapter
from llamatrain.errors import FileError
from llamatrain.gguf import legacy
from llamatrain.gguf.constants import MAGIC
from llamatrain.gguf.reader import open_gguf
from llamatrain.io.mapped_file import map_file
from llamatrain.model.hyperparameters import Hyperparameters

NEEDED = "an adapter (a GGUF file, a .bin of llama.cpp's old finetune, or a folder of PEFT's)"


def read_adapter(path: Path, h: Hyperparameters) -> Adapter:
    """Read an adapter for a base with hyperparameters `h`; that it fits is not checked yet."""
    if not path.exists():
        raise missing_adapter(path)
    if path.is_dir():
        if not (path / peft.CONFIG).exists():
            raise FileError(f"{path}: the folder has no {peft.CONFIG}; give {NEEDED}", code="not-an-adapter")
        return peft.read_peft(path, h)
    if path.name in (peft.CONFIG, peft.WEIGHTS):
        raise FileError(f"{path}: this file is a part of an adapter; give its folder", code="adapter-part")
    magic = map_file(path, NEEDED).read_bytes(0, len(MAGIC))
    if magic == MAGIC or magic in legacy.KINDS:
        file = open_gguf(path)
        return (
            legacy_checkpoint.read_legacy_checkpoint(file)
            if legacy_checkpoint.is_legacy_checkpoint(file)
            else gguf.parse_adapter(file)
        )
    if magic == legacy_bin.MAGIC:
        return legacy_bin.read_legacy_bin(path)
    raise FileError(
        f"{path}: unknown format (the file begins with {magic!r}); give {NEEDED}", code="not-an-adapter"
    )
