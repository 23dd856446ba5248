"""Losses of preferences: the better of two answers to a prompt must become more likely than the other.

    orpo    Hong et al. 2024: cross entropy of the chosen answer, plus beta times the log odds ratio; no reference
    dpo     Rafailov et al. 2023: beta times how far both moved from the reference
    simpo   Meng et al. 2024: beta times the mean log-probability per token, with a margin gamma; no reference
    kto     Ethayarajh et al. 2024: single answers, relative to how far the model moved for mismatched answers

A reward is beta times the quantity that an objective compares. The reference is the model without its trained
adapter.
"""

from dataclasses import dataclass
from typing import Literal

from llamatrain.graph import ops as O
from llamatrain.graph.ops import (
    cross_entropy_rows,
    detached,
    linear_cross_entropy_rows,
    log_odds,
    relu,
    sigmoid,
    softplus,
)
from llamatrain.graph.tensor import I32, Tensor, placeholder
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.lora import Weights
from llamatrain.model.transformer import TrainingGraph, compute_logits, forward, make_inputs

Kind = Literal["orpo", "dpo", "simpo", "kto"]
DEFAULT_BETA = {"orpo": 0.1, "dpo": 0.1, "simpo": 2.0, "kto": 0.1}  # where none is said
MISMATCHED = "others."  # what inputs of answers to other prompts are called


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A preference objective with its parameters."""

    kind: Kind
    beta: float
    gamma: float = 1.0  # the margin that SimPO asks for
    desirable: float = 1.0  # how much KTO makes of answers that are good, and of those that are not
    undesirable: float = 1.0

    @property
    def uses_reference(self) -> bool:
        """True if it compares with the reference model."""
        return self.kind in ("dpo", "kto")

    @property
    def averages_tokens(self) -> bool:
        """True if an answer's log-probability is the mean over its tokens, not the sum."""
        return self.kind in ("orpo", "simpo")

    @property
    def compares_pairs(self) -> bool:
        """True if it compares pairs, False for single answers."""
        return self.kind != "kto"

    def max_answers(self, batch: int, length: int) -> int:
        """Return the largest number of answers in a batch; chosen ones first, then rejected ones.

        Each segment has at least one token.
        """
        return batch * length // 2 * 2 if self.compares_pairs else batch


@dataclass(frozen=True, kw_only=True)
class PairForward:
    """The forward pass of a model over all answers of a batch."""

    h: Hyperparameters
    table: Tensor
    batch: int
    length: int
    answers: int
    sparse: bool
    flash: bool

    def inputs(self, name: str = "") -> dict[str, Tensor]:
        """Return the inputs by name: `sequences` is each token's answer, `shares` its weight in that answer."""
        rows = make_inputs(
            self.batch, self.length, self.table.dtype, self.flash, self.sparse and self.flash, name
        )
        count = rows.pop("weights").shape
        shares = placeholder(f"{name}shares", count, self.table.dtype)
        return rows | {"sequences": placeholder(f"{name}sequences", count, I32), "shares": shares}

    def losses(self, weights: Weights, inputs: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the loss of each token, and the inputs of the blocks."""
        weights = weights.for_rows(self.length, inputs.get("weighed"))
        x, borders = forward(self.h, weights, inputs, self.table)
        if self.flash and self.h.output_weight not in weights.deltas:
            return linear_cross_entropy_rows(
                x, weights[self.h.output_weight], inputs["targets"], cap=self.h.logit_cap
            ), borders
        return cross_entropy_rows(compute_logits(self.h, x, weights), inputs["targets"]), borders

    def sum_answers(self, losses: Tensor, shares: Tensor, sequences: Tensor) -> Tensor:
        """Return the sum over the tokens of each answer: (answers,)."""
        weighted = O.reshape(O.mul(losses, shares), shape=(losses.shape[0], 1))
        return O.reshape(O.get_rows_back(weighted, sequences, rows=self.answers), shape=(self.answers,))

    def log_probs(self, losses: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """Return the log-probability of each answer: (answers,)."""
        return O.scale(self.sum_answers(losses, inputs["shares"], inputs["sequences"]), by=-1.0)


def preference_loss(
    objective: Objective,
    h: Hyperparameters,
    weights: Weights,
    reference: Weights,
    *,
    batch: int,
    length: int,
    table: Tensor,
    sparse: bool = False,
    flash: bool = True,
) -> TrainingGraph:
    """Build the graph of a preference loss.

    The input `worth` is the weight of each pair or answer in the loss; `words` that of each token of the
    chosen answers, for ORPO.
    """
    answers = objective.max_answers(batch, length)
    ways = PairForward(
        h=h, table=table, batch=batch, length=length, answers=answers, sparse=sparse, flash=flash
    )
    inputs = ways.inputs()
    losses, borders = ways.losses(weights, inputs)
    log_probs = ways.log_probs(losses, inputs)
    log_ratios = (
        O.sub(log_probs, ways.log_probs(ways.losses(reference, inputs)[0], inputs))
        if objective.uses_reference
        else log_probs
    )
    rewards = O.scale(log_ratios, by=objective.beta)
    inputs["worth"] = placeholder(
        "worth", (answers // 2 if objective.compares_pairs else answers,), table.dtype
    )
    if objective.compares_pairs:
        parts = [O.mul(inputs["worth"], pair_loss(objective, rewards, log_probs))]
    else:
        parts = [O.mul(inputs["worth"], kto_loss(objective, ways, (weights, reference), rewards, inputs))]
    if objective.kind == "orpo":
        inputs["words"] = placeholder("words", losses.shape, table.dtype)
        parts.append(ways.sum_answers(losses, inputs["words"], inputs["sequences"]))
    terms = [O.sum(part) for part in parts]
    loss = O.add(*terms) if len(terms) > 1 else terms[0]
    return TrainingGraph(
        inputs, table, borders, loss, {}, terms=tuple(terms), rewards=rewards, term_parts=tuple(parts)
    )


def kto_loss(
    objective: Objective,
    ways: PairForward,
    models: tuple[Weights, Weights],
    rewards: Tensor,
    inputs: dict[str, Tensor],
) -> Tensor:
    """Return KTO's loss of each answer, relative to the mean reward of mismatched answers (at least 0)."""
    mismatched = ways.inputs(MISMATCHED)
    share, sides = (
        placeholder(name, rewards.shape, rewards.dtype) for name in (f"{MISMATCHED}part", "sides")
    )
    policy, reference = (
        ways.log_probs(ways.losses(weights, mismatched)[0], mismatched) for weights in models
    )
    reference_point = O.scale(
        detached(relu(O.sum(O.mul(O.sub(policy, reference), share)))), by=objective.beta
    )
    inputs |= {f"{MISMATCHED}{name}": weights for name, weights in mismatched.items()} | {
        f"{MISMATCHED}part": share,
        "sides": sides,
    }
    return sigmoid(O.mul(sides, O.sub(reference_point, rewards)))


def pair_loss(objective: Objective, rewards: Tensor, log_probs: Tensor) -> Tensor:
    """Return the loss of each pair."""
    if objective.kind == "orpo":
        return O.scale(softplus(rejected_minus_chosen(log_odds(log_probs))), by=objective.beta)
    margin = O.fill(
        shape=(), value=objective.gamma if objective.kind == "simpo" else 0.0, dtype=rewards.dtype
    )
    return softplus(O.add(rejected_minus_chosen(rewards), margin))


def rejected_minus_chosen(answers: Tensor) -> Tensor:
    """Return rejected minus chosen, for each pair."""
    half = answers.size // 2
    chosen, rejected = (O.view(answers, slices=((first, first + half, 1),)) for first in (0, half))
    return O.sub(rejected, chosen)
