"""Adapters with random factors, in memory and as files of each kind."""

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from llamatrain.adapters.adapter import Adapter, LoraPair
from llamatrain.model.hyperparameters import Hyperparameters
from tests.helpers.small_models import EMBEDDINGS


def linear(h: Hyperparameters) -> list[str]:
    """The matrices, less those at both ends."""
    return [name for name, shape in h.shapes.items() if len(shape) == 2 and name.startswith("blk.")]


def adapter(
    h: Hyperparameters,
    names: Iterable[str],
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 1,
    scale: float | None = None,
) -> Adapter:
    """Strong enough to change what the model says."""
    random = np.random.default_rng(seed)
    pairs = {}
    for name in names:
        out, into = h.shapes[name] if len(h.shapes[name]) == 2 else (1, *h.shapes[name])
        shapes = ((out, rank), (into, rank)) if name == EMBEDDINGS else ((rank, into), (out, rank))
        a, b = (0.1 * random.standard_normal(shape, np.float32) for shape in shapes)
        pairs[name] = LoraPair(a, b, (alpha / rank if alpha else 1.0) if scale is None else scale)
    return Adapter(source=Path("made"), alpha=alpha, pairs=pairs, name="mine")


def ggla(made: Adapter, rank: int, alpha: int) -> bytes:
    """As llama.cpp's old finetune would have written it: A is turned, and the embeddings have their parts the other way round."""
    raw = b"algg" + struct.pack("<III", 1, rank, alpha)
    for name, pair in made.pairs.items():
        old_a, old_b = (pair.b, pair.a) if name == EMBEDDINGS else (pair.a.T, pair.b)
        for suffix, factor in ((".loraA", old_a), (".loraB", old_b)):
            axes = factor.shape[::-1]
            while len(axes) > 1 and axes[-1] == 1:
                axes = axes[:-1]
            named = f"{name}{suffix}".encode()
            raw += struct.pack(f"<III{len(axes)}I", len(axes), len(named), 0, *axes) + named
            raw += bytes(-len(raw) % 32) + np.ascontiguousarray(factor).tobytes()
    return raw


def merged(weights: Mapping[str, np.ndarray], adapters: Iterable[Adapter]) -> dict[str, np.ndarray]:
    """Weights in memory with what adapters add."""
    made = dict(weights)
    for each in adapters:
        made |= {name: made[name] + each.delta(name).reshape(made[name].shape) for name in each.pairs}
    return made


def same(one: Adapter, other: Adapter) -> bool:
    """Bit for bit."""
    return one.pairs.keys() == other.pairs.keys() and all(
        (x.scale, x.a.shape, x.b.shape, x.a.tobytes(), x.b.tobytes())
        == (y.scale, y.a.shape, y.b.shape, y.a.tobytes(), y.b.tobytes())
        for x, y in ((one.pairs[name], other.pairs[name]) for name in one.pairs)
    )
