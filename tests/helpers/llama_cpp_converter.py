"""Runs llama.cpp's converter, if LLAMATRAIN_LLAMA_CPP names the folder of llama.cpp with convert_hf_to_gguf.py.

LLAMATRAIN_LLAMA_CPP_PATH names more folders with modules that it needs, such as sentencepiece.

As a program, `python FILE CONVERTER TYPE FOLDER...`, it converts folders without a tokenizer: it writes FOLDER.gguf beside
each folder and prints a line for each that failed.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

CONVERTER = os.environ.get("LLAMATRAIN_LLAMA_CPP", "")
needs_converter = pytest.mark.skipif(
    not CONVERTER, reason="LLAMATRAIN_LLAMA_CPP names no folder of llama.cpp"
)


def run_converter(*command: str | Path) -> str:
    """Run a Python program that imports the converter's modules, and return what it writes to stdout."""
    more = [f"{CONVERTER}/gguf-py", os.environ.get("LLAMATRAIN_LLAMA_CPP_PATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(more)}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[-500:]
    return done.stdout.decode()


def convert_folder(folder: Path, out: Path, *options: str) -> Path:
    """Convert a folder with its tokenizer."""
    run_converter(f"{CONVERTER}/convert_hf_to_gguf.py", folder, "--outfile", out, *options)
    return out


def convert_without_tokenizer(folders: Iterable[Path], kind: str) -> str:
    """Convert folders, and return a line for each that failed."""
    return run_converter(__file__, CONVERTER, kind, *folders)


# ---- the program --------------------------------------------------------------------


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
