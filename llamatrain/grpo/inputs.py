"""The arrays of the inputs of the loss, by input name: of each token of a batch."""

from collections.abc import Callable

import numpy as np

from llamatrain.data.batches import Batch, RolloutBatch
from llamatrain.grpo.loss import ADVANTAGES, ANSWER_ROWS, OLD_LOG_PROBS, SHARES


def rollouts_of(batch: Batch) -> RolloutBatch:
    """Return the answers of a batch."""
    assert batch.rollouts
    return batch.rollouts


ROLLOUT_INPUTS: dict[str, Callable[[Batch], np.ndarray]] = {
    ANSWER_ROWS: lambda batch: np.repeat(np.arange(len(batch.tokens), dtype=np.int32), batch.tokens.shape[1]),
    SHARES: lambda batch: rollouts_of(batch).shares,
    ADVANTAGES: lambda batch: rollouts_of(batch).advantages,
    OLD_LOG_PROBS: lambda batch: rollouts_of(batch).old_log_probs,
}
