"""Finds the local file of a name: a path stays as it is, and the files of other names are found or downloaded."""

from pathlib import Path

from llamatrain.config.remote_names import Use, remote_name
from llamatrain.extensions import load_extensions

_located = dict[tuple[str, Use], Path]()  # of this process, which asks a server once


def locate(path: str | Path, use: Use = "model") -> Path:
    """Return the local path of a file or folder that is named by its path or by a remote name."""
    name = remote_name(path)
    if name is None:
        return Path(path)
    known = _located.get((name, use))
    if known is None or not known.exists():
        known = _located[name, use] = resolve(name, use)
    return known


def resolve(name: str, use: Use) -> Path:
    """Return the local path of a remote name."""
    scheme = name.partition(":")[0]
    if scheme == "ollama":
        from llamatrain.sources.ollama import find_layer

        return find_layer(name, use)
    if scheme == "hf":
        from llamatrain.sources.hub import fetch

        return fetch(name, use)
    from llamatrain.sources.download import download

    return download(name, use)


def locate_model(path: str | Path) -> Path:
    """Return the local GGUF file of a model. A folder with weights in safetensors is converted.

    The extension point "model_folders" has a function that converts such a folder and returns the GGUF file.
    """
    local = locate(path, "model")
    if can_convert(local):
        convert = load_extensions("model_folders")[0]
        converted: Path = convert(local)
        return converted
    return local


def can_convert(folder: Path) -> bool:
    """Return True if a folder has a model of Hugging Face's form, and conversion is supported."""
    return (
        folder.is_dir()
        and bool(load_extensions("model_folders"))
        and (folder / "config.json").is_file()
        and any(folder.glob("*.safetensors"))
    )
