"""Distillation: a frozen teacher whose distribution is a second target (Hinton et al. 2015).

The teacher runs in the same graph on the same tokens. Nothing of it is stored, and its memory is part of the
plan.
"""

from dataclasses import dataclass

import numpy as np

from llamatrain.gguf.reader import Gguf
from llamatrain.graph.ops import add, cont, cross_entropy_loss, scale, soft_max, view
from llamatrain.graph.tensor import BF16, F32, Tensor, state
from llamatrain.model.frozen_weights import copy_weights
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.lora import Weights

PREFIX = "teacher."  # the prefix of its leaves' names


@dataclass(frozen=True)
class Teacher:
    """A frozen model that gives target distributions."""

    h: Hyperparameters
    share: float  # the share of the loss
    half: bool  # True if matrices are copied to bf16 instead of float32

    def leaf(self, name: str, prefix: str = PREFIX) -> Tensor:
        """Return the graph leaf of a weight."""
        shape = self.h.shapes[name]
        return state(f"{prefix}{name}", shape, BF16 if self.half and self.h.is_matrix(name) else F32)

    @property
    def weights(self) -> Weights:
        """The leaves of all weights."""
        return Weights({name: self.leaf(name) for name in self.h.shapes})

    @property
    def nbytes(self) -> int:
        """The bytes of all weights."""
        return sum(self.leaf(name).nbytes for name in self.h.shapes)

    def rope_table(self, positions: int) -> tuple[Tensor, np.ndarray]:
        """Return the leaf and the array of the teacher's own rotations."""
        array = self.h.rope_table(positions)
        return state(f"{PREFIX}rope", array.shape), array

    def load(self, gguf: Gguf, threads: int) -> dict[str, np.ndarray]:
        """Load the weights from a file, by the names of their leaves."""
        arrays = dict(copy_weights(gguf, (self.leaf(name, "") for name in self.h.shapes), threads))
        return {f"{PREFIX}{name}": array for name, array in arrays.items()}


def distillation_loss(
    logits: Tensor, teacher_logits: Tensor, targets: Tensor, weights: Tensor, share: float
) -> Tensor:
    """Return the weighted sum of the data's loss and the cross entropy with the teacher's distribution.

    The latter is the divergence from the teacher plus the teacher's entropy. Teacher tokens that the model
    does not have are dropped.
    """
    rows, words = logits.shape
    if teacher_logits.shape[1] > words:
        teacher_logits = cont(view(teacher_logits, slices=((0, rows, 1), (0, words, 1))))
    parts = ((soft_max(teacher_logits), share), (targets, 1.0 - share))
    losses = [
        cross_entropy_loss(logits, distribution, scale(weights, by=part))
        for distribution, part in parts
        if part
    ]
    return losses[0] if len(losses) == 1 else add(*losses, name="loss")
