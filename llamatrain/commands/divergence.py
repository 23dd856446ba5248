"""Compares what two models predict for the same tokens: losses, divergence, and the most likely tokens.

The divergence of a token is that of Kullback and Leibler in nats, KL(base || model): the mean of log(base / model)
over the distribution of the base, as `llama-perplexity --kl-divergence` computes it.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llamatrain.data.batches import Batch
from llamatrain.train.evaluate import BatchLoss, sample_units

if TYPE_CHECKING:
    from llamatrain.train.programs import EvalPrograms


class PairLoss(NamedTuple):
    """The losses of two models on a batch, and the divergence of one from the other.

    In the divergence, `correct` counts the tokens for which both models have the same most likely token.
    """

    base: BatchLoss
    model: BatchLoss
    divergence: BatchLoss


def compare_batch(base: "EvalPrograms", model: "EvalPrograms", batch: Batch) -> PairLoss:
    """Return losses and divergence of a batch; the logits of a few tokens are in memory at a time."""
    scored = batch.weights != 0
    targets, weights = batch.targets[scored], batch.weights[scored].astype(np.float64)
    sums, correct, start = np.zeros((3, len(targets))), np.zeros(3, np.int64), 0
    pairs = zip(base.scored_logits(batch), model.scored_logits(batch), strict=True)
    with np.errstate(invalid="ignore"):  # a loss that is not finite is reported
        for logits in pairs:
            logs = [log_softmax(rows) for rows in logits]
            chunk = slice(start, start := start + len(logs[0]))
            sums[:, chunk] = [*(-rows[range(len(rows)), targets[chunk]] for rows in logs), divergence(*logs)]
            first, second = (rows.argmax(1) for rows in logits)
            correct += [
                np.sum(top == other)
                for top, other in ((first, targets[chunk]), (second, targets[chunk]), (first, second))
            ]
    return PairLoss(
        *(
            BatchLoss(
                float(losses.sum()),
                float(weights.sum()),
                len(targets),
                int(count),
                sample_units(batch, losses),
            )
            for losses, count in zip(sums * weights, correct, strict=True)
        )
    )


def log_softmax(rows: np.ndarray) -> np.ndarray:
    """Return log-probabilities in float64."""
    shifted = rows.astype(np.float64) - rows.max(axis=1, keepdims=True)
    shifted -= np.log(np.sum(np.exp(shifted), axis=1, keepdims=True))
    return shifted


def divergence(base: np.ndarray, model: np.ndarray) -> np.ndarray:
    """Return KL(base || model) of each row of log-probabilities; rounding does not make it negative."""
    return np.maximum(0.0, np.sum(np.exp(base) * (base - model), axis=1))
