"""Lists the tensors of adapters that are no GGUF: PEFT folders and files of llama.cpp's old finetune."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from llamatrain.adapters import peft
from llamatrain.adapters.formats import formats_of
from llamatrain.adapters.read import NEEDED
from llamatrain.errors import FileError
from llamatrain.gguf.constants import MAGIC
from llamatrain.gguf.wrong_file import describe_folder
from llamatrain.io.mapped_file import map_file


class ListedTensor(NamedTuple):
    """A tensor of a listing."""

    name: str
    type: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Listing:
    """Format, metadata and tensors of a file."""

    format: str
    metadata: dict[str, Any]
    tensors: list[ListedTensor]


def list_adapter(path: Path) -> Listing | None:
    """Return the listing of an adapter, or None for other files."""
    if path.is_dir() or path.name in (peft.CONFIG, peft.WEIGHTS):
        folder = path if path.is_dir() else path.parent
        if not (folder / peft.CONFIG).exists():
            if any(folder.glob("*.gguf")):
                raise FileError(describe_folder(folder), code="is-a-folder")
            raise FileError(
                f"{folder}: the folder has no {peft.CONFIG}; give a GGUF file or {NEEDED}",
                code="not-an-adapter",
            )
        config, entries = peft.list_tensors(folder)
        tensors = [
            ListedTensor(name, entry.dtype, entry.shape, entry.raw.size) for name, entry in entries.items()
        ]
        return Listing("PEFT", config, tensors)
    for adapter_format in formats_of(map_file(path).read_bytes(0, len(MAGIC))):
        if adapter_format.list_tensors:
            values, infos = adapter_format.list_tensors(path)
            tensors = [ListedTensor(info.name, info.type.name, info.shape, info.nbytes) for info in infos]
            return Listing(adapter_format.name, values, tensors)
    return None
