"""Runs llama.cpp's converter on folders, without a tokenizer: the program `python FILE CONVERTER TYPE FOLDER...`.

It writes FOLDER.gguf beside each folder and prints a line for each that failed.
"""

import logging
import sys
from pathlib import Path
from typing import Any


def convert(folder: Path, kind: str, modules: Any) -> None:
    """Convert a folder."""
    base, gguf = modules.base, modules.base.gguf
    found = base.ModelBase.load_hparams(folder, False)
    cls = modules.get_model_class(base.get_model_architecture(found, base.ModelType.TEXT))
    cls.no_mtp = True
    kinds = {"f32": "ALL_F32", "auto": "GUESSED", "q8_0": "MOSTLY_Q8_0"}
    cls(folder, gguf.LlamaFileType[kinds[kind]], folder.with_suffix(".gguf")).write()


def without_tokenizer(cls: type) -> None:
    """Let a class and those derived from it write no tokenizer."""
    cls.set_vocab = lambda self: None  # type: ignore[attr-defined]
    inner = [value for value in vars(cls).values() if isinstance(value, type)]
    for other in (*cls.__subclasses__(), *inner):
        without_tokenizer(other)


def main(converter: str, kind: str, folders: list[str]) -> None:
    """Convert all folders."""
    sys.path[:0] = [converter, f"{converter}/gguf-py"]
    import conversion
    import torch
    from conversion import base

    logging.disable(logging.CRITICAL)
    with torch.inference_mode():
        for name in folders:
            try:
                folder = Path(name)
                found = base.ModelBase.load_hparams(folder, False)
                conversion.get_model_class(base.get_model_architecture(found, base.ModelType.TEXT))
                without_tokenizer(base.TextModel)
                convert(folder, kind, conversion)
            except Exception as error:
                print(f"{name}: {type(error).__name__} {error}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
