"""Opens a folder of Hugging Face's transformers: its configuration, and its tensors in one or more files.

The folder is untrusted: an index may name files inside the folder only, and each tensor may be in one file only.
"""

from dataclasses import dataclass
from pathlib import Path

from llamatrain.errors import FileError, MissingError
from llamatrain.gguf.parser import quote
from llamatrain.gguf.safetensors import StoredTensor, open_safetensors, read_json
from llamatrain.importing.config import Config, read_config

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
MAX_INDEX = 1 << 26  # bytes of JSON; the largest models have a tenth of that


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a model of Hugging Face's transformers."""

    folder: Path
    config: Config
    tensors: dict[str, StoredTensor]


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a folder that have weights, or that list them."""
    return sorted(path for path in folder.glob("*.safetensors*") if path.is_file())


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a folder, and check that all files that it names are there and that their contents are listed."""
    if not folder.is_dir():
        problem = "there is no such folder" if not folder.exists() else "this is no folder"
        raise MissingError(
            f"{folder}: {problem}; give the folder of a transformers model", code="missing-folder"
        )
    if not (folder / CONFIG).is_file():
        raise MissingError(
            f"{folder}: {CONFIG} is missing; give the folder of a transformers model", code="missing-file"
        )
    config = read_config(folder / CONFIG)
    return Checkpoint(folder, config, read_tensors(folder))


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of all files by name."""
    index = folder / INDEX
    if not index.is_file():
        return open_safetensors(find_single_file(folder))
    places = read_index(index)
    tensors: dict[str, StoredTensor] = {}
    for name in sorted({*places.values()}):
        for tensor, stored in open_safetensors(shard_path(folder, name)).items():
            if tensor in tensors:
                raise FileError(
                    f"{folder / name}: another file also has the tensor {quote(tensor)}", code="invalid-index"
                )
            tensors[tensor] = stored
    if difference := sorted(tensors.keys() ^ places.keys()):
        problem = "is in no file" if difference[0] in places else "is in a file, but not in the index"
        raise FileError(
            f"{index}: the tensor {quote(difference[0])} {problem}; download the folder again",
            code="invalid-index",
        )
    return tensors


def find_single_file(folder: Path) -> Path:
    """Return the one file with the weights of a folder without an index."""
    found = [folder / SINGLE] if (folder / SINGLE).is_file() else sorted(folder.glob("model*.safetensors"))
    if not found:
        hint = f"{SINGLE} or {INDEX} is missing"
        if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
            hint += "; files of torch's pickles are not read, so save the model as safetensors"
        raise MissingError(f"{folder}: {hint}", code="missing-file")
    if len(found) > 1:
        raise MissingError(
            f"{folder}: there are {len(found)} files of weights, but {INDEX} is missing; download it, too",
            code="missing-file",
        )
    return found[0]


def read_index(path: Path) -> dict[str, str]:
    """Return the name of the file of each tensor."""
    if path.stat().st_size > MAX_INDEX:
        raise FileError(f"{path}: larger than {MAX_INDEX} bytes; it is no index", code="invalid-index")
    places = read_json(path, path.read_bytes()).get("weight_map")
    if not (isinstance(places, dict) and places and all(isinstance(name, str) for name in places.values())):
        raise FileError(
            f"{path}: weight_map must be an object with the file of each tensor", code="invalid-index"
        )
    return places


def shard_path(folder: Path, name: str) -> Path:
    """Return the path of a file that an index names; it must be a file of the folder, or a link that is there.

    Hugging Face's cache has links to files elsewhere, so a link may lead outside; its name may not.
    """
    path = folder / name
    if Path(name).name != name or "\\" in name or "\0" in name or name in ("", ".", ".."):
        raise FileError(
            f"{folder / INDEX}: a file must be in the same folder (got {quote(name)})", code="invalid-index"
        )
    if not path.is_file():
        raise MissingError(f"{path}: the index names this file, but it is missing", code="missing-file")
    return path
