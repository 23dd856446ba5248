"""Loads a model with adapters; weights stay in the mapped file."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from llamatrain.adapters.options import AdapterOptions
from llamatrain.platform.terminal import log_line

if TYPE_CHECKING:
    import numpy as np

    from llamatrain.adapters.adapter import Adapter
    from llamatrain.gguf.reader import Gguf
    from llamatrain.model.frozen_weights import Decodes
    from llamatrain.model.hyperparameters import Hyperparameters
    from llamatrain.model.lora import Weights


def load_with_adapters(
    gguf: "Gguf",
    options: AdapterOptions,
    threads: int,
    decodes: "Decodes | None" = None,
    predicts_text: bool = True,
) -> "tuple[Hyperparameters, Weights, dict[str, np.ndarray]]":
    """Return hyperparameters, weights with adapters, and the arrays by name.

    The model must be one that predicts text if that is needed.
    """
    from llamatrain.adapters import read as reading
    from llamatrain.model.hyperparameters import check_predicts_text, read_hyperparameters

    h = read_hyperparameters(gguf)
    if predicts_text:
        check_predicts_text(h, gguf.path)
    adapters = [reading.read_adapter(path, h).scale_by(scale) for path, scale in options.scaled]
    for adapter in adapters:
        if kind := adapter.merged_type:
            log_line(
                f"note: {adapter.source} was trained for a model in {kind[:40]}; used without merging, it gives other "
                "results; merge it with export-lora"
            )
    return h, *add_adapters(gguf, h, adapters, threads, decodes)


def add_adapters(
    gguf: "Gguf",
    h: "Hyperparameters",
    adapters: "Iterable[Adapter]",
    threads: int,
    decodes: "Decodes | None" = None,
) -> "tuple[Weights, dict[str, np.ndarray]]":
    """Return weights with adapters, and the arrays by name."""
    from llamatrain.adapters.adapter import checked_factors
    from llamatrain.model.frozen_weights import add_frozen_adapters, copy_weights, load_frozen
    from llamatrain.model.load import check_memory

    factors = [checked_factors(adapter, h, gguf.path) for adapter in adapters]
    weights, arrays = load_frozen(gguf, h, threads, decodes=decodes)
    leaves = [leaf for name, leaf in weights.tensors.items() if name not in arrays]
    check_memory(gguf, sum(leaf.nbytes for leaf in leaves))
    arrays |= dict(copy_weights(gguf, leaves, threads))
    return add_frozen_adapters(weights, arrays, factors)
