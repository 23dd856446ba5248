"""Factors of rotations that files have as tensors: those of Llama 3.1, and lists in a configuration."""

import math

import numpy as np

from llamatrain.importing.config import Config


def llama3_factors(config: Config) -> dict[str, np.ndarray]:
    """Return what the wavelength of each pair is multiplied with, if the rotation is scaled as in Llama 3.1.

    Short waves are kept, long ones are stretched by the factor, and those between by a share of it.
    """
    if str(config.rope.get("rope_type", "")).lower() != "llama3":
        return {}
    size, base = config.head_size, config.rope_number("rope_theta", 10000.0)
    factor = config.rope_number("factor", 8.0)
    low, high = config.rope_number("low_freq_factor", 1.0), config.rope_number("high_freq_factor", 4.0)
    length = config.rope_number("original_max_position_embeddings", 8192)
    if base <= 0 or factor <= 0 or low <= 0 or high <= low:
        raise config.error(
            "rope_parameters", "positive numbers, low_freq_factor below the high one", dict(config.rope)
        )
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    waves = np.float32(2 * math.pi) / (np.float32(1) / np.float32(base) ** exponents)
    share = (np.float32(length) / waves - np.float32(low)) / np.float32(high - low)
    between = 1 / ((1 - share) / np.float32(factor) + share)
    factors = np.where(waves < length / high, 1, np.where(waves > length / low, factor, between))
    return {"rope_freqs.weight": factors.astype(np.float32)}


def long_factors(config: Config) -> dict[str, np.ndarray]:
    """Return the lists of factors for short and for long texts, if a configuration has them."""
    if not config.rope.get("long_factor"):
        return {}
    lists = {name: config.numbers(f"{name}_factor", config.rope) for name in ("long", "short")}
    return {f"rope_factors_{name}.weight": np.array(each, np.float32) for name, each in lists.items()}
