"""A model with adapters as commands run it: the weights as they lie in the file."""

from typing import TYPE_CHECKING

from llamatrain.adapters.options import LoraOptions

if TYPE_CHECKING:
    import numpy as np

    from llamatrain.files.reader import Gguf
    from llamatrain.model.hyperparameters import Hyperparameters
    from llamatrain.model.lora import Weights


def opened(gguf: "Gguf", options: LoraOptions, threads: int) -> "tuple[Hyperparameters, Weights, dict[str, np.ndarray]]":
    """Its numbers, its weights with what adapters add, and their arrays by name."""
    from llamatrain.adapters import adapter as adapters
    from llamatrain.adapters import reading
    from llamatrain.errors import FileError
    from llamatrain.model.frozen import frozen, with_pairs
    from llamatrain.model.hyperparameters import read

    h = read(gguf)
    pairs = []
    for path, scale in options.scaled:
        adapter = reading.read(path, (h.heads, h.kv_heads)).scaled(scale)
        adapters.check(adapter, h.shapes, h.tied, gguf.path)
        if norms := [name for name in adapter.pairs if len(h.shapes[name]) == 1]:
            raise FileError(f"{path}: has a pair for the norm {norms[0]}: merge it into the model with export-lora")
        pairs.append({name: (pair.a, pair.b, pair.scale) for name, pair in adapter.pairs.items()})
    weights, arrays = frozen(gguf, h, threads)
    weights, more = with_pairs(weights, pairs)
    return h, weights, arrays | more
