"""DPO (Rafailov et al. 2023): rewards are beta times how far each answer moved from the reference."""

from dataclasses import dataclass

from llamatrain.graph.tensor import Tensor
from llamatrain.preference.objective import Answers, Objective, margin_loss


@dataclass(frozen=True, kw_only=True)
class DPO(Objective):
    """DPO."""

    uses_reference = True

    def loss(self, answers: Answers) -> Tensor:
        """Return the loss of each pair."""
        return margin_loss(answers.rewards, 0.0)


OBJECTIVE = DPO
