"""A model with adapters as commands run it: the weights as they lie in the file."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from llamatrain.adapters.options import AdapterOptions

if TYPE_CHECKING:
    import numpy as np

    from llamatrain.adapters.adapter import Adapter
    from llamatrain.gguf.reader import Gguf
    from llamatrain.model.hyperparameters import Hyperparameters
    from llamatrain.model.lora import Weights


def opened(
    gguf: "Gguf", options: AdapterOptions, threads: int
) -> "tuple[Hyperparameters, Weights, dict[str, np.ndarray]]":
    """Its numbers, its weights with what adapters add, and their arrays by name."""
    from llamatrain.adapters import read as reading
    from llamatrain.model.hyperparameters import read_hyperparameters

    h = read_hyperparameters(gguf)
    adapters = [reading.read(path, h).scaled(scale) for path, scale in options.scaled]
    return h, *adapted(gguf, h, adapters, threads)


def adapted(
    gguf: "Gguf", h: "Hyperparameters", adapters: "Iterable[Adapter]", threads: int
) -> "tuple[Weights, dict[str, np.ndarray]]":
    from llamatrain.adapters.adapter import factors_of
    from llamatrain.model.frozen_weights import add_frozen_adapters, copy_weights, load_frozen
    from llamatrain.model.load import check_memory

    factors = [factors_of(adapter, h, gguf.path) for adapter in adapters]
    weights, arrays = load_frozen(gguf, h, threads)
    copied = [leaf for name, leaf in weights.tensors.items() if name not in arrays]
    check_memory(gguf, sum(leaf.nbytes for leaf in copied))
    arrays |= copy_weights(gguf, copied, threads)
    return add_frozen_adapters(weights, arrays, factors)
