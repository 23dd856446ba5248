"""What was named as a model and is none, told by what lies there: a folder, other formats of models, packed files, text."""

import os
from contextlib import suppress
from itertools import islice
from pathlib import Path

from llamatrain.config.not_found import CONVERTER

NEEDED = "a GGUF file is needed"
LOOKED_AT = 2000  # names in a folder
HEAD = 512  # bytes
WEIGHTS = (".safetensors", ".bin", ".pth", ".pt")
PACKED = {b"\x1f\x8b": "gzip -d", b"\x28\xb5\x2f\xfd": "zstd -d", b"BZh": "bzip2 -d", b"\xfd7zX": "xz -d"}


def folder_told(path: Path) -> str:
    """Of a folder, and what would do."""
    names = list[str]()
    with suppress(OSError), os.scandir(path) as found:
        names = sorted(each.name for each in islice(found, LOOKED_AT))
    if "adapter.gguf" in names and "model.gguf" not in names:
        adapter = path / "adapter.gguf"
        return f"{path}: the folder of a run, whose adapter is for another model; {NEEDED}, and --lora {adapter} takes it"
    if model := next(
        (name for name in ("model.gguf", *names) if name.endswith(".gguf") and name in names), None
    ):
        return f"{path}: this is a folder; {NEEDED}, such as {path / model}"
    if "adapter_config.json" in names:
        return f"{path}: this is a folder with an adapter of PEFT's; {NEEDED}, and --lora {path} takes the adapter"
    if "config.json" in names or any(name.endswith(WEIGHTS) for name in names):
        return f"{path}: a model in Hugging Face's format; {NEEDED}: {CONVERTER} makes one of this folder"
    return f"{path}: this is a folder; {NEEDED}"


def file_told(path: Path, head: bytes) -> str:
    """Of a file by how it begins; nothing where that says nothing."""
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 28:
        return (
            f"{path}: weights in safetensors; {NEEDED}: {CONVERTER} makes one of the folder that they lie in"
        )
    if head[:2] == b"PK" or (head[:1] == b"\x80" and path.suffix in WEIGHTS):
        what = "weights as PyTorch saves them" if path.suffix in WEIGHTS else "a zip archive"
        return f"{path}: {what}; {NEEDED}: {CONVERTER} makes one of a model's folder"
    if how := next((how for mark, how in PACKED.items() if head.startswith(mark)), None):
        return f"{path}: a packed file; {NEEDED}: unpack it first, as with `{how}`"
    with suppress(UnicodeDecodeError):
        text = head.decode()
        if (
            "\0" not in text
            and len(text) > 8
            and all(each.isprintable() or each in "\n\r\t\f" for each in text)
        ):
            return f"{path}: a text, and no model; {NEEDED}"
    return ""
