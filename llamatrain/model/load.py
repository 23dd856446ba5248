"""Loads a model file's weights as float32, and checks the memory for it."""

from collections.abc import Mapping

import numpy as np

from llamatrain.errors import LlamatrainError
from llamatrain.gguf import quants
from llamatrain.gguf.reader import FileTensor, Gguf
from llamatrain.io.madvise import release_pages
from llamatrain.io.mapped_file import verify_unchanged
from llamatrain.platform.memory import available_bytes


def load_weights(gguf: Gguf, arrays: Mapping[str, np.ndarray], threads: int = 1) -> None:
    """Decode the weights of a file into arrays of the same shapes."""
    with verify_unchanged(gguf.mapped_files):
        for name, array in arrays.items():
            decode_tensor(gguf, gguf.tensors[name], threads, array)
            release_pages(gguf.tensors[name].file)


def is_mapped_f32(tensor: FileTensor) -> bool:
    """Return True if a tensor can be used where it is mapped."""
    return tensor.type.name == "F32" and tensor.raw.ctypes.data % 4 == 0


def decode_tensor(
    gguf: Gguf, tensor: FileTensor, threads: int = 1, out: np.ndarray | None = None
) -> np.ndarray:
    """Decode a tensor to float32; errors name the file and the tensor. A matrix of one row may fill a vector."""
    raw = tensor.raw
    try:
        if out is not None:
            raw = raw.reshape(*out.shape[:-1], raw.shape[-1])
        return quants.decode(raw, tensor.type, out=out, threads=threads)
    except quants.QuantError as error:
        raise LlamatrainError(f"{gguf.path}: {tensor.name}: {error}", code=error.code) from None


def check_memory(gguf: Gguf, needed: int, remedy: str = "a smaller model") -> None:
    """Raise an error if less than `needed` bytes are available; `remedy` names what would need less."""
    available = available_bytes()
    if available is not None and needed > available:
        raise LlamatrainError(
            f"{gguf.path}: needs {needed:,} bytes of memory, but {available:,} are available; {remedy} "
            "needs less",
            code="out-of-memory",
        )
