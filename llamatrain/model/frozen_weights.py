"""Frozen weights: graph leaves that are not trained, and their arrays, mapped or copied."""

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from llamatrain.gguf import quants
from llamatrain.gguf.quants.kinds import COMPILED
from llamatrain.gguf.reader import Gguf
from llamatrain.gguf.types import GgmlType
from llamatrain.graph.tensor import BF16, F32, QuantizedType, Tensor, quantized, state
from llamatrain.io.madvise import release_pages
from llamatrain.io.mapped_file import verify_unchanged
from llamatrain.model import load
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.lora import Delta, Weights
from llamatrain.platform.memory import allocate

Arrays = dict[str, np.ndarray]

Decodes = Callable[[QuantizedType], bool]  # returns True if products decode weights of a type

CHUNK_BYTES = 8 << 20  # bytes of a file that are copied at a time


def has_compiled_decoder(dtype: QuantizedType) -> bool:
    """Return True if compiled products decode weights of a type."""
    return dtype.kind.number in COMPILED


def load_frozen(
    gguf: Gguf,
    h: Hyperparameters,
    threads: int = 1,
    copied: bool = False,
    half: bool = False,
    decodes: Decodes | None = None,
) -> tuple[Weights, Arrays]:
    """Return the leaves of all weights, and the arrays of those that are used as they lie in the file.

    Matrices that are `copied` to bf16 have a leaf only, until `copy_weights` makes the array. The same holds
    for matrices of types that products cannot decode, as `decodes` says; these become float32, or bf16 with `half`.
    """
    decodes = decodes or has_compiled_decoder
    tensors: dict[str, Tensor] = {}
    arrays: Arrays = {}
    for name, shape in h.shapes.items():
        tensor, kind = gguf.tensors[name], h.weight_kind(name)
        if kind.stays_float32:  # copied: a short read of a mapped file may map two megabytes around it
            tensors[name] = state(name, shape, F32)
            arrays[name] = np.array(load.decode_tensor(gguf, tensor, threads)).reshape(shape)
            release_pages(tensor.raw)
        elif load.is_mapped_f32(tensor) and not copied:
            tensors[name] = state(name, shape, F32)
            arrays[name] = tensor.raw.view(np.float32)
        elif copied or kind.role == "stack" or not decodes(quantized(tensor.type.name)):
            tensors[name] = state(name, shape, BF16 if copied or half else F32)
        else:
            tensors[name] = state(name, shape, quantized(tensor.type.name))
            arrays[name] = tensor.raw
    return Weights(tensors), arrays


def copy_weights(gguf: Gguf, leaves: Iterable[Tensor], threads: int = 1) -> Iterator[tuple[str, np.ndarray]]:
    """Yield matrices by name, decoded to the types of their leaves, and release the pages of the file."""
    with verify_unchanged(gguf.mapped_files):
        for leaf in leaves:
            tensor = gguf.tensors[leaf.name]
            if leaf.dtype is BF16:
                yield leaf.name, copy_as_bf16(tensor.raw, tensor.type, leaf.shape, threads)
            else:
                yield leaf.name, load.decode_tensor(gguf, tensor, threads)
                release_pages(tensor.raw)


def copy_as_bf16(raw: np.ndarray, kind: GgmlType, shape: tuple[int, ...], threads: int = 1) -> np.ndarray:
    """Decode a matrix to bf16 in steps and release the pages of the file."""
    copy = allocate(2 * int(np.prod(shape))).view(np.uint16).reshape(-1, shape[-1])
    rows = raw.reshape(-1, raw.shape[-1])
    step = max(1, CHUNK_BYTES // rows.shape[1])
    for lo in range(0, len(rows), step):
        quants.decode(rows[lo : lo + step], kind, bf16=True, out=copy[lo : lo + step], threads=threads)
        release_pages(rows[: lo + step])  # from the beginning: later reads map some earlier pages again
    return copy.reshape(shape)


def bf16_copy_bytes(h: Hyperparameters) -> int:
    """Return the bytes of all matrices in bf16."""
    return sum(2 * int(np.prod(shape)) for name, shape in h.shapes.items() if h.is_matrix(name))


def add_frozen_adapters(
    weights: Weights, arrays: Arrays, adapters: Iterable[Mapping[str, tuple[np.ndarray, np.ndarray, float]]]
) -> tuple[Weights, Arrays]:
    """Add adapters that are not trained: the factors a and b and a scale for each weight.

    What they add to norms is added to the norms' arrays, once.
    """
    arrays = {**arrays}
    for number, pairs in enumerate(adapters):
        deltas = {}
        for name, (a, b, scale) in pairs.items():
            if len(weights[name].shape) == 1:
                arrays[name] = arrays[name] + (np.float32(scale) * b @ a)[0]
                continue
            left, right = (
                state(f"{number}.{name}.lora_{half}", factor.shape) for half, factor in (("a", a), ("b", b))
            )
            arrays |= {
                left.name: np.ascontiguousarray(a, np.float32),
                right.name: np.ascontiguousarray(b, np.float32),
            }
            deltas[name] = [Delta(left, right, scale)]
        weights = weights.with_deltas(deltas)
    return weights, arrays
