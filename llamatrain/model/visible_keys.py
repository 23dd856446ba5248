"""The keys that a token sees in a model whose tokens see earlier and later ones: those of its sample, within a window.

A window is symmetric: half of it lies to each side of a token. Attention takes the first and the last key of each
token; the windows of a model lead to different ones.
"""

import numpy as np

from llamatrain.model.hyperparameters import Hyperparameters


def visible_windows(h: Hyperparameters) -> list[int]:
    """Return the windows of all blocks, each once; 0 is none."""
    return sorted({h.attention_mask(layer).window for layer in range(h.layers)})


def range_names(window: int) -> tuple[str, ...]:
    """Return the names of the inputs with the first and the last key that each token sees."""
    return (f"starts.{window}", f"lasts.{window}") if window else ("starts", "lasts")


def visible_ranges(h: Hyperparameters, starts: np.ndarray, lasts: np.ndarray) -> dict[str, np.ndarray]:
    """Return these inputs by name, given the first and the last token of each token's sample: (batch, length)."""
    names = [name for window in visible_windows(h) for name in range_names(window)]
    return {name: visible_range(name, starts, lasts) for name in names}


def visible_range(name: str, starts: np.ndarray, lasts: np.ndarray) -> np.ndarray:
    """Return one of these inputs."""
    kind, _, window = name.partition(".")
    positions = np.arange(starts.shape[1], dtype=np.int32)
    half = int(window) // 2 if window else starts.shape[1]
    return np.maximum(starts, positions - half) if kind == "starts" else np.minimum(lasts, positions + half)


def last_tokens(starts: np.ndarray) -> np.ndarray:
    """Return the last token of each token's sample, given the first one: (batch, length)."""
    length = starts.shape[1]
    is_last = np.concatenate([starts[:, 1:] != starts[:, :-1], np.ones((len(starts), 1), bool)], axis=1)
    ends = np.where(is_last, np.arange(length, dtype=np.int32), np.int32(length))
    return np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]
