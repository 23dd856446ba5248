"""The interface of preference objectives; each one is a file in objectives/.

An objective defines the loss of each pair, or of each answer, from rewards and log-probabilities of answers.
A reward is beta times the quantity that the objective compares. The reference is the model without its
trained adapter.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from llamatrain.data.preference_records import PreferenceKind
from llamatrain.graph import ops as O
from llamatrain.graph.ops import softplus
from llamatrain.graph.tensor import Tensor
from llamatrain.model.lora import Weights
from llamatrain.preference.forward import PairForward


class Answers(NamedTuple):
    """The answers of a batch, as a loss uses them. Chosen answers come first, then rejected ones."""

    rewards: Tensor  # (answers,)
    log_probs: Tensor  # (answers,)
    forward: PairForward
    weights: Weights
    reference: Weights
    inputs: dict[str, Tensor]  # an objective may add inputs


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A preference objective. Its fields are set by the options of the same names."""

    data: ClassVar[PreferenceKind] = "pairs"
    default_beta: ClassVar[float] = 0.1
    uses_reference: ClassVar[bool] = False  # rewards are relative to the reference
    averages_tokens: ClassVar[bool] = False  # log-probabilities are means over tokens, not sums
    trains_chosen: ClassVar[bool] = False  # the cross entropy of chosen answers is added to the loss
    min_batch: ClassVar[int] = 1

    beta: float

    @classmethod
    def option_names(cls) -> set[str]:
        """Return the options that have an effect."""
        return {field.name for field in fields(cls)}

    @classmethod
    def from_options(cls, values: Mapping[str, Any]) -> Self:
        """Create the objective from the values of options."""
        settings = {name: values[name] for name in cls.option_names()}
        if settings["beta"] is None:
            settings["beta"] = cls.default_beta
        return cls(**settings)

    @property
    def compares_pairs(self) -> bool:
        """True if it compares pairs, False for single answers."""
        return self.data == "pairs"

    def max_answers(self, batch: int, length: int) -> int:
        """Return the largest number of answers in a batch. Each segment has at least one token."""
        return batch * length // 2 * 2 if self.compares_pairs else batch

    def unit_weights(self, sides: np.ndarray) -> np.ndarray:
        """Return the weight of each pair or answer; `sides` is 0 for padding, and -1 for rejected answers."""
        return np.abs(sides)

    def loss(self, answers: Answers) -> Tensor:
        """Return the loss of each pair or answer."""
        raise NotImplementedError


def rejected_minus_chosen(answers: Tensor) -> Tensor:
    """Return rejected minus chosen, for each pair."""
    half = answers.size // 2
    chosen, rejected = (O.view(answers, slices=((first, first + half, 1),)) for first in (0, half))
    return O.sub(rejected, chosen)


def margin_loss(rewards: Tensor, margin: float) -> Tensor:
    """Return -log sigmoid(chosen - rejected - margin), for each pair."""
    return softplus(
        O.add(rejected_minus_chosen(rewards), O.fill(shape=(), value=margin, dtype=rewards.dtype))
    )
