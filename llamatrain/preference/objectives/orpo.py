"""ORPO (Hong et al. 2024): cross entropy of the chosen answer, plus beta times the log odds ratio."""

from dataclasses import dataclass

from llamatrain.graph import ops as O
from llamatrain.graph.ops import log_odds, softplus
from llamatrain.graph.tensor import Tensor
from llamatrain.preference.objective import Answers, Objective, rejected_minus_chosen


@dataclass(frozen=True, kw_only=True)
class ORPO(Objective):
    """ORPO. It needs no reference."""

    averages_tokens = True
    trains_chosen = True

    def loss(self, answers: Answers) -> Tensor:
        """Return the loss of each pair, without the cross entropy."""
        return O.scale(softplus(rejected_minus_chosen(log_odds(answers.log_probs))), by=self.beta)


OBJECTIVE = ORPO
