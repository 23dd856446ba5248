"""A model's weights as they lie in its file: leaves of a graph that nothing trains, over the bytes of the mapped file."""

from collections.abc import Iterable, Mapping

import numpy as np

from llamatrain.engine.program import packed_copy
from llamatrain.files.reader import Gguf
from llamatrain.graph.tensor import BF16, F32, Tensor, quantised, state
from llamatrain.model import load
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.lora import Delta, Weights

Arrays = dict[str, np.ndarray]


def frozen(gguf: Gguf, h: Hyperparameters, threads: int = 1, copied: bool = False) -> tuple[Weights, Arrays]:
    """Leaves and their arrays by name; matrices that are `copied` have a leaf for their copy only."""
    tensors: dict[str, Tensor] = {}
    arrays: Arrays = {}
    for name, shape in h.shapes.items():
        tensor = gguf.tensors[name]
        if len(shape) == 1 or (load.in_place(tensor) and not copied):
            tensors[name] = state(name, shape, F32)
            arrays[name] = tensor.raw.view(np.float32) if load.in_place(tensor) else load.decode(gguf, tensor, threads)
        elif copied:
            tensors[name] = state(name, shape, BF16)
        else:
            tensors[name] = state(name, shape, quantised(tensor.type.name))
            arrays[name] = tensor.raw
    return Weights(tensors), arrays


def copies(gguf: Gguf, h: Hyperparameters, threads: int = 1) -> Arrays:
    """The matrices decoded to bf16, and their pages let go."""
    tensors = {name: gguf.tensors[name] for name, shape in h.shapes.items() if len(shape) > 1}
    return {name: packed_copy(each.raw, each.type, h.shapes[name], threads) for name, each in tensors.items()}


def copies_of(h: Hyperparameters) -> int:
    """Bytes of the matrices in bf16."""
    return sum(2 * int(np.prod(shape)) for shape in h.shapes.values() if len(shape) > 1)


def with_pairs(
    weights: Weights, adapters: Iterable[Mapping[str, tuple[np.ndarray, np.ndarray, float]]]
) -> tuple[Weights, Arrays]:
    """The weights with adapters that nothing trains either: for each the factors a and b, and a scale, by weight's name."""
    arrays: Arrays = {}
    for number, pairs in enumerate(adapters):
        deltas = {}
        for name, (a, b, scale) in pairs.items():
            left, right = (state(f"{number}.{name}.lora_{half}", factor.shape) for half, factor in (("a", a), ("b", b)))
            arrays |= {left.name: np.ascontiguousarray(a, np.float32), right.name: np.ascontiguousarray(b, np.float32)}
            deltas[name] = [Delta(left, right, scale)]
        weights = weights.with_deltas(deltas)
    return weights, arrays
