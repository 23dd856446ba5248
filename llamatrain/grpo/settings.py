"""The settings of the loss."""

from dataclasses import dataclass
from typing import Literal

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo"]
Scaling = Literal["group", "batch", "none"]


@dataclass(frozen=True, kw_only=True)
class Grpo:
    """The settings of GRPO (Shao et al. 2024), with the names that they have in TRL."""

    num_generations: int = 8  # answers to each prompt, which are compared
    num_iterations: int = 1  # steps with the same answers
    beta: float = 0.0  # weight of the divergence from the model without its adapter
    epsilon: float = 0.2  # how far below 1 a ratio of probabilities counts
    epsilon_high: float = 0.2  # and above it
    temperature: float = 1.0
    loss_type: LossType = "dapo"
    scale_rewards: Scaling = "group"
    max_completion_length: int = 256
    mask_truncated_completions: bool = False

    @property
    def keeps_log_probs(self) -> bool:
        """True if answers are trained again after the weights have changed."""
        return self.num_iterations > 1
