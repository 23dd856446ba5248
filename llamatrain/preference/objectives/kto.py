"""KTO (Ethayarajh et al. 2024): single answers, relative to how far the model moved for mismatched answers."""

from dataclasses import dataclass

import numpy as np

from llamatrain.graph import ops as O
from llamatrain.graph.ops import detached, relu, sigmoid
from llamatrain.graph.tensor import Tensor, placeholder
from llamatrain.preference.forward import MISMATCHED
from llamatrain.preference.objective import Answers, Objective


@dataclass(frozen=True, kw_only=True)
class KTO(Objective):
    """KTO. The batch also contains its prompts with the answers of other rows."""

    data = "answers"
    uses_reference = True
    min_batch = 2

    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def unit_weights(self, sides: np.ndarray) -> np.ndarray:
        """Return the weight of each answer by its label."""
        return np.where(sides > 0, self.desirable_weight, self.undesirable_weight) * np.abs(sides)

    def loss(self, answers: Answers) -> Tensor:
        """Return the loss of each answer, relative to the mean reward of mismatched answers (at least 0)."""
        rewards, forward = answers.rewards, answers.forward
        inputs = forward.inputs(MISMATCHED)
        share = placeholder(f"{MISMATCHED}mismatched_shares", rewards.shape, rewards.dtype)
        sides = placeholder("sides", rewards.shape, rewards.dtype)
        log_probs, reference_log_probs = (
            forward.log_probs(forward.losses(weights, inputs)[0], inputs)
            for weights in (answers.weights, answers.reference)
        )
        mean = O.sum(O.mul(O.sub(log_probs, reference_log_probs), share))
        reference_point = O.scale(detached(relu(mean)), by=self.beta)
        answers.inputs.update({f"{MISMATCHED}{name}": tensor for name, tensor in inputs.items()})
        answers.inputs.update({f"{MISMATCHED}mismatched_shares": share, "sides": sides})
        return sigmoid(O.mul(sides, O.sub(reference_point, rewards)))


OBJECTIVE = KTO
