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

    model: BatchLoss
    base: BatchLoss
    divergence: BatchLoss


def compare_batch(model: "EvalPrograms", base: "EvalPrograms", batch: Batch) -> PairLoss:
    """Return losses and divergence of a batch; the logits of a few tokens are in memory at a time."""
    scored = batch.weights != 0
    targets, weights = batch.targets[scored], batch.weights[scored].astype(np.float64)
    values, hits, start = np.zeros((3, len(targets))), np.zeros((3, len(targets)), bool), 0
    for logits in zip(model.scored_logits(batch), base.scored_logits(batch), strict=True):
        part = slice(start, start + len(logits[0]))
        start = part.stop
        with np.errstate(invalid="ignore"):  # a loss that is not finite is reported
            own, other = (log_softmax(rows) for rows in logits)
            values[:, part] = (
                *(target_losses(logs, targets[part]) for logs in (own, other)),
                divergence(other, own),
            )
        first, second = (rows.argmax(1) for rows in logits)
        hits[:, part] = first == targets[part], second == targets[part], first == second
    return PairLoss(
        *(
            BatchLoss(
                float(losses.sum()),
                float(weights.sum()),
                len(targets),
                int(correct.sum()),
                sample_units(batch, losses),
            )
            for losses, correct in zip(values * weights, hits, strict=True)
        )
    )


def target_losses(logs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return the loss of each row of log-probabilities, whose token is the target."""
    return np.asarray(-logs[np.arange(len(logs)), targets])


def log_softmax(rows: np.ndarray) -> np.ndarray:
    """Return log-probabilities in float64."""
    shifted = rows.astype(np.float64) - rows.max(axis=1, keepdims=True)
    shifted -= np.log(np.sum(np.exp(shifted), axis=1, keepdims=True))
    return shifted


def divergence(base: np.ndarray, model: np.ndarray) -> np.ndarray:
    """Return KL(base || model) of each row of log-probabilities; rounding does not make it negative."""
    return np.maximum(0.0, np.sum(np.exp(base) * (base - model), axis=1))
