"""From logits to a token, in llama.cpp's order: penalty, top-k, top-p, min-p, temperature, draw.

What a draw follows from is the seed and the token's number, and nothing else: there is no state to save.
"""

import math
from collections.abc import Sequence

import numpy as np

from llamatrain.errors import LlamatrainError
from llamatrain.sample.options import SamplingOptions


def draw(logits: np.ndarray, options: SamplingOptions, number: int, before: Sequence[int]) -> int:
    """The token that comes `number`th, after the tokens `before` (those of the prompt, too)."""
    if not np.all(np.isfinite(logits)):
        raise LlamatrainError(
            f"the model gives no finite numbers for token {number + 1}: its weights are damaged"
        )
    logits = penalised(logits.astype(np.float64), before, options)
    if options.temp == 0:
        return int(np.argmax(logits))
    tokens = candidates(logits, options)
    shares = np.cumsum(probabilities(logits[tokens] / options.temp))
    generator = np.random.Generator(np.random.Philox(key=options.seed % (1 << 64), counter=number))
    place = np.searchsorted(shares, generator.random() * shares[-1], side="right")
    return int(tokens[min(place, len(tokens) - 1)])


def penalised(logits: np.ndarray, before: Sequence[int], options: SamplingOptions) -> np.ndarray:
    """What was there lately is moved down: a logit above 0 divided by the penalty, another multiplied."""
    last = len(before) if options.repeat_last_n < 0 else options.repeat_last_n
    if last and options.repeat_penalty != 1 and len(before):
        seen = np.unique(np.asarray(before[-last:]))
        by = options.repeat_penalty
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / by, logits[seen] * by)
    return logits


def candidates(logits: np.ndarray, options: SamplingOptions) -> np.ndarray:
    """The tokens to draw from, the likeliest first, of equals the one with the smaller number; there is always one."""
    count = min(options.top_k or len(logits), len(logits))
    tokens = np.flatnonzero(logits >= low_bound(logits, count))
    tokens = tokens[np.argsort(-logits[tokens], kind="stable")][:count]
    if options.top_p < 1:
        together = np.cumsum(probabilities(logits[tokens]))
        tokens = tokens[: 1 + np.searchsorted(together, options.top_p)]
    if options.min_p > 0:
        tokens = tokens[: np.count_nonzero(logits[tokens] >= logits[tokens[0]] + math.log(options.min_p))]
    return tokens


BLOCK = 64


def low_bound(logits: np.ndarray, count: int) -> float:
    """At least `count` logits reach this, and not many more: as many blocks have one, and sorting their tops is quick."""
    whole = len(logits) // BLOCK
    if whole <= count:
        return -math.inf
    tops = logits[: whole * BLOCK].reshape(whole, BLOCK).max(1)
    return float(np.partition(tops, -count)[-count])


def probabilities(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()
