"""Reads an adapter of any format, recognized by its content."""

from pathlib import Path

from llamatrain.adapters import gguf, peft
from llamatrain.adapters.adapter import Adapter
from llamatrain.adapters.formats import formats_of
from llamatrain.config.not_found import missing_adapter
from llamatrain.errors import FileError
from llamatrain.gguf.constants import MAGIC
from llamatrain.gguf.reader import open_gguf, other_formats
from llamatrain.io.mapped_file import map_file
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.sources.names import locate

NEEDED = "an adapter (a GGUF file, a .bin of llama.cpp's old finetune, or a folder of PEFT's)"


def read_adapter(path: Path, h: Hyperparameters) -> Adapter:
    """Read an adapter for a base with hyperparameters `h`; that it fits is not checked yet."""
    path = locate(path, "adapter")
    if not path.exists():
        raise missing_adapter(path)
    if path.is_dir():
        if not (path / peft.CONFIG).exists():
            raise FileError(f"{path}: the folder has no {peft.CONFIG}; give {NEEDED}", code="not-an-adapter")
        return peft.read_peft(path, h)
    if path.name in (peft.CONFIG, peft.WEIGHTS):
        raise FileError(f"{path}: this file is a part of an adapter; give its folder", code="adapter-part")
    magic = map_file(path, NEEDED).read_bytes(0, len(MAGIC))
    for adapter_format in formats_of(magic):
        if adapter := adapter_format.read(path):
            return adapter
    if magic == MAGIC or magic in other_formats():
        return gguf.parse_adapter(open_gguf(path))
    raise FileError(
        f"{path}: unknown format (the file begins with {magic!r}); give {NEEDED}", code="not-an-adapter"
    )
