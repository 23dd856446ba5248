"""Describes a path that is not a GGUF file: a folder, another model format, a compressed file, or text."""

import os
from contextlib import suppress
from itertools import islice
from pathlib import Path

from llamatrain.config.not_found import CONVERTER

NEEDED = "a GGUF file is needed"
MAX_NAMES = 2000  # names in a folder
HEAD_BYTES = 512  # bytes
SAFETENSORS = ".safetensors"
WEIGHTS = (".bin", ".pth", ".pt")
PACKED = {b"\x1f\x8b": "gzip -d", b"\x28\xb5\x2f\xfd": "zstd -d", b"BZh": "bzip2 -d", b"\xfd7zX": "xz -d"}


def describe_folder(path: Path) -> str:
    """Return an error message for a folder, with a hint by what is in it."""
    names = list[str]()
    with suppress(OSError), os.scandir(path) as entries:
        names = sorted(entry.name for entry in islice(entries, MAX_NAMES))
    if "adapter.gguf" in names and "model.gguf" not in names:
        adapter = path / "adapter.gguf"
        return f"{path}: the folder of a run, whose adapter is for another model; {NEEDED}, and --lora {adapter} takes it"
    if model := next(
        (name for name in ("model.gguf", *names) if name.endswith(".gguf") and name in names), None
    ):
        return f"{path}: this is a folder; {NEEDED}, such as {path / model}"
    if "adapter_config.json" in names:
        return f"{path}: this is a folder with an adapter of PEFT's; {NEEDED}, and --lora {path} takes the adapter"
    if any(name.endswith(SAFETENSORS) for name in names):  # with config.json the folder would be converted
        return f"{path}: weights in safetensors without config.json; download the whole model"
    if "config.json" in names or any(name.endswith(WEIGHTS) for name in names):
        return f"{path}: a model as PyTorch saves it; {NEEDED}: {CONVERTER} makes one of this folder"
    return f"{path}: this is a folder; {NEEDED}"


def describe_file(path: Path, head: bytes) -> str:
    """Return an error message for a file by its first bytes, or an empty string if they are unknown."""
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 28:
        return (
            f"{path}: weights in safetensors; {NEEDED}: name the folder that they lie in, which is converted"
        )
    if head[:2] == b"PK" or (head[:1] == b"\x80" and path.suffix in WEIGHTS):
        contents = "weights as PyTorch saves them" if path.suffix in WEIGHTS else "a zip archive"
        return f"{path}: {contents}; {NEEDED}: {CONVERTER} makes one of a model's folder"
    if command := next((command for mark, command in PACKED.items() if head.startswith(mark)), None):
        return f"{path}: a packed file; {NEEDED}: unpack it first, as with `{command}`"
    with suppress(UnicodeDecodeError):
        text = head.decode()
        if (
            "\0" not in text
            and len(text) > 8
            and all(character.isprintable() or character in "\n\r\t\f" for character in text)
        ):
            return f"{path}: a text, and no model; {NEEDED}"
    return ""
