"""SimPO (Meng et al. 2024): rewards are beta times the mean log-probability, with a margin gamma."""

from dataclasses import dataclass

from llamatrain.graph.tensor import Tensor
from llamatrain.preference.objective import Answers, Objective, margin_loss


@dataclass(frozen=True, kw_only=True)
class SimPO(Objective):
    """SimPO. It needs no reference."""

    default_beta = 2.0
    averages_tokens = True

    gamma: float = 1.0

    def loss(self, answers: Answers) -> Tensor:
        """Return the loss of each pair."""
        return margin_loss(answers.rewards, self.gamma)


OBJECTIVE = SimPO
