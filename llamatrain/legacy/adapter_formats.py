"""The adapter formats of llama.cpp's old finetune."""

from pathlib import Path
from typing import Any

from llamatrain.adapters.adapter import Adapter
from llamatrain.adapters.formats import AdapterFormat
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.types import TensorInfo
from llamatrain.legacy import adapter_bin, adapter_checkpoint, checkpoint_file


def read_checkpoint_adapter(path: Path) -> Adapter | None:
    """Read the adapter of a checkpoint, or return None for other GGUF files."""
    gguf = open_gguf(path)
    is_legacy = adapter_checkpoint.is_legacy_checkpoint(gguf)
    return adapter_checkpoint.read_legacy_checkpoint(gguf) if is_legacy else None


def list_bin(path: Path) -> tuple[dict[str, Any], list[TensorInfo]]:
    """Return rank and alpha of a .bin file, and its tensors."""
    values, tensors = adapter_bin.list_tensors(path)
    return dict(values), [*tensors]


FORMATS = [
    AdapterFormat(
        name="llama.cpp's old finetune",
        magics=(adapter_bin.MAGIC,),
        read=adapter_bin.read_legacy_bin,
        list_tensors=list_bin,
    ),
    AdapterFormat(
        name="a checkpoint of llama.cpp's old finetune",
        magics=(b"GGUF", *checkpoint_file.KINDS),
        read=read_checkpoint_adapter,
    ),
]
