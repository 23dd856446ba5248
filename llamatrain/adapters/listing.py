"""Lists the tensors of adapters that are no GGUF: PEFT folders and files of llama.cpp's old finetune."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from llamatrain.adapters import legacy_bin, peft
from llamatrain.adapters.read import NEEDED
from llamatrain.errors import FileError
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
    if map_file(path).read_bytes(0, len(legacy_bin.MAGIC)) != legacy_bin.MAGIC:
        return None
    values, infos = legacy_bin.list_tensors(path)
    return Listing(
        "llama.cpp's old finetune",
        dict(values),
        [ListedTensor(i.name, i.type.name, i.shape, i.nbytes) for i in infos],
    )
