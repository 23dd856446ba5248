"""Turns the rewards of a step's answers into advantages, and their lengths into the shares of their tokens."""

import numpy as np

from llamatrain.grpo.settings import Grpo

LEAST_DEVIATION = 1e-4  # added to deviations, as in TRL


def compute_advantages(rewards: np.ndarray, settings: Grpo) -> np.ndarray:
    """Return how much better each answer is than the mean of its group, in units of the standard deviation.

    The rewards are those of groups, one after the other.
    """
    groups = rewards.reshape(-1, settings.num_generations)
    differences = groups - groups.mean(axis=1, keepdims=True)
    if settings.scale_rewards == "group":
        differences /= groups.std(axis=1, ddof=1, keepdims=True) + LEAST_DEVIATION
    elif settings.scale_rewards == "batch":
        differences /= rewards.std(ddof=1) + LEAST_DEVIATION
    return differences.reshape(-1)


def compute_shares(sizes: np.ndarray, settings: Grpo) -> np.ndarray:
    """Return the share in the loss of each token of each answer; a size of 0 stands for an answer that is left out.

    grpo takes the mean of each answer and then of all, dr_grpo divides by the largest size instead, and dapo and
    bnpo take the mean of all tokens of the step.
    """
    if settings.loss_type == "grpo":
        return 1 / (np.maximum(sizes, 1) * len(sizes))
    if settings.loss_type == "dr_grpo":
        return np.full(len(sizes), 1 / (len(sizes) * settings.max_completion_length))
    return np.full(len(sizes), 1 / max(1, sizes.sum()))
