"""The host's part of AdamW (Loshchilov and Hutter 2017); the update itself is the graph's op `opt_step_adamw`."""

from collections.abc import Sequence

import numpy as np


def schedule_input(step: int, rate: float, beta1: float, beta2: float) -> np.ndarray:
    """What the graph's `schedule` input holds in a step, counted from 1: the rate and both bias corrections."""
    return np.array([rate, 1.0 - beta1**step, 1.0 - beta2**step], np.float32)  # (3,)


def decay_of(shape: Sequence[int], decay: float, decay_min_ndim: int = 2) -> float:
    """A tensor's weight decay: none for those of few dimensions, such as the gains of norms."""
    return decay if len(shape) >= decay_min_ndim else 0.0
