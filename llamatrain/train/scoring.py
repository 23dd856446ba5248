"""How well a model foretells data, over its batches.

The loss is a sum over tokens, weighted, by the sum of the weights; its standard error is that of such a ratio over batches, which
for batches of one size is llama.cpp's (ggml_opt_result_loss). The accuracy's is that of a share of the tokens.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from llamatrain.data.rows import Batch
from llamatrain.report.events import Score
from llamatrain.train.programs import Runner


@dataclass
class Scoring:
    losses: list[float] = field(default_factory=list)  # of batches, sums
    weights: list[float] = field(default_factory=list)
    tokens: int = 0
    right: int | None = 0

    def add(self, runner: Runner, batch: Batch) -> None:
        loss, right = runner.judged(batch)
        self.losses.append(loss)
        self.weights.append(float(batch.weights.sum(dtype=np.float64)))
        self.tokens += int(np.count_nonzero(batch.weights))
        self.right = None if right is None or self.right is None else self.right + right

    @property
    def score(self) -> Score:
        count, total, tokens = len(self.losses), math.fsum(self.weights), self.tokens
        loss = math.fsum(self.losses) / total
        error = accuracy = spread = None
        if count > 1 and math.isfinite(loss):
            apart = ((one - loss * weight) ** 2 for one, weight in zip(self.losses, self.weights, strict=True))
            error = math.sqrt(math.fsum(apart) * count / (count - 1)) / total
        if self.right is not None and math.isfinite(loss):
            accuracy = self.right / tokens
            spread = math.sqrt(accuracy * (1 - accuracy) / (tokens - 1)) if tokens > 1 else None
        return Score(loss=loss, loss_error=error, accuracy=accuracy, accuracy_error=spread, tokens=tokens)
