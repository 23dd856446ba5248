"""Draws a token from logits, in llama.cpp's order: penalty, top-k, top-p, min-p, temperature, draw.

A draw depends only on the seed and the token's number: there is no state to save.
"""

import math
from collections.abc import Sequence

import numpy as np

from llamatrain.errors import LlamatrainError
from llamatrain.sample.options import SamplingOptions


def draw_token(logits: np.ndarray, options: SamplingOptions, number: int, history: Sequence[int]) -> int:
    """Draw token `number`, which follows the tokens `history` (prompt included)."""
    if not np.all(np.isfinite(logits)):
        raise LlamatrainError(
            f"the logits of token {number + 1} are not finite: the weights are damaged", code="not-finite"
        )
    logits = penalize_repeats(logits.astype(np.float64), history, options)
    if options.temp == 0:
        return int(np.argmax(logits))
    tokens = select_candidates(logits, options)
    cumulative = np.cumsum(softmax(logits[tokens] / options.temp))
    generator = np.random.Generator(np.random.Philox(key=options.seed % (1 << 64), counter=number))
    index = np.searchsorted(cumulative, generator.random() * cumulative[-1], side="right")
    return int(tokens[min(index, len(tokens) - 1)])


def penalize_repeats(logits: np.ndarray, history: Sequence[int], options: SamplingOptions) -> np.ndarray:
    """Lower the logits of recent tokens: divide those above 0 by the penalty, multiply the others."""
    last = len(history) if options.repeat_last_n < 0 else options.repeat_last_n
    if last and options.repeat_penalty != 1 and len(history):
        recent = np.unique(np.asarray(history[-last:]))
        penalty = options.repeat_penalty
        logits[recent] = np.where(logits[recent] > 0, logits[recent] / penalty, logits[recent] * penalty)
    return logits


def select_candidates(logits: np.ndarray, options: SamplingOptions) -> np.ndarray:
    """Return the tokens to draw from, likeliest first, lower ids first among equals; at least one."""
    count = min(options.top_k or len(logits), len(logits))
    tokens = np.flatnonzero(logits >= top_k_bound(logits, count))
    tokens = tokens[np.argsort(-logits[tokens], kind="stable")][:count]
    if options.top_p < 1:
        cumulative = np.cumsum(softmax(logits[tokens]))
        tokens = tokens[: 1 + np.searchsorted(cumulative, options.top_p)]
    if options.min_p > 0:
        tokens = tokens[: np.count_nonzero(logits[tokens] >= logits[tokens[0]] + math.log(options.min_p))]
    return tokens


BLOCK = 64


def top_k_bound(logits: np.ndarray, count: int) -> float:
    """Return a bound that at least `count` logits reach, and few more, from the maxima of blocks."""
    blocks = len(logits) // BLOCK
    if blocks <= count:
        return -math.inf
    tops = logits[: blocks * BLOCK].reshape(blocks, BLOCK).max(1)
    return float(np.partition(tops, -count)[-count])


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the probabilities of logits."""
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()
