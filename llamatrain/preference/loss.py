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
from llamatrain.model.transformer import Training, inputs_of, logits_of, through

Kind = Literal["orpo", "dpo", "simpo", "kto"]
BETA = {"orpo": 0.1, "dpo": 0.1, "simpo": 2.0, "kto": 0.1}  # where none is said
OTHERS = "others."  # what inputs of answers to other prompts are called


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A preference objective with its parameters."""

    kind: Kind
    beta: float
    gamma: float = 1.0  # the margin that SimPO asks for
    desirable: float = 1.0  # how much KTO makes of answers that are good, and of those that are not
    undesirable: float = 1.0

    @property
    def refers(self) -> bool:
        """True if it compares with the reference model."""
        return self.kind in ("dpo", "kto")

    @property
    def averages(self) -> bool:
        """True if an answer's log-probability is the mean over its tokens, not the sum."""
        return self.kind in ("orpo", "simpo")

    @property
    def pairs(self) -> bool:
        """True if it compares pairs, False for single answers."""
        return self.kind != "kto"

    def answers(self, batch: int, length: int) -> int:
        """Return the largest number of answers in a batch; chosen ones first, then rejected ones.

        Each segment has at least one token.
        """
        return batch * length // 2 * 2 if self.pairs else batch


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
        rows = inputs_of(
            self.batch, self.length, self.table.dtype, self.flash, self.sparse and self.flash, name
        )
        count = rows.pop("weights").shape
        shares = placeholder(f"{name}shares", count, self.table.dtype)
        return rows | {"sequences": placeholder(f"{name}sequences", count, I32), "shares": shares}

    def losses(self, weights: Weights, inputs: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the loss of each token, and the inputs of the blocks."""
        weights = weights.for_rows(self.length, inputs.get("weighed"))
        x, borders = through(self.h, weights, inputs, self.table)
        if self.flash and self.h.output not in weights.deltas:
            return linear_cross_entropy_rows(
                x, weights[self.h.output], inputs["targets"], cap=self.h.cap
            ), borders
        return cross_entropy_rows(logits_of(self.h, x, weights), inputs["targets"]), borders

    def summed(self, losses: Tensor, shares: Tensor, sequences: Tensor) -> Tensor:
        """Return the sum over the tokens of each answer: (answers,)."""
        shared = O.reshape(O.mul(losses, shares), shape=(losses.shape[0], 1))
        return O.reshape(O.get_rows_back(shared, sequences, rows=self.answers), shape=(self.answers,))

    def likely(self, losses: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """Return the log-probability of each answer: (answers,)."""
        return O.scale(self.summed(losses, inputs["shares"], inputs["sequences"]), by=-1.0)


def comparing(
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
) -> Training:
    """Build the graph of a preference loss.

    The input `worth` is the weight of each pair or answer in the loss; `words` that of each token of the
    chosen answers, for ORPO.
    """
    answers = objective.answers(batch, length)
    ways = PairForward(
        h=h, table=table, batch=batch, length=length, answers=answers, sparse=sparse, flash=flash
    )
    inputs = ways.inputs()
    losses, borders = ways.losses(weights, inputs)
    likely = ways.likely(losses, inputs)
    moved = (
        O.sub(likely, ways.likely(ways.losses(reference, inputs)[0], inputs)) if objective.refers else likely
    )
    rewards = O.scale(moved, by=objective.beta)
    inputs["worth"] = placeholder("worth", (answers // 2 if objective.pairs else answers,), table.dtype)
    if objective.pairs:
        each = [O.mul(inputs["worth"], of_pairs(objective, rewards, likely))]
    else:
        each = [O.mul(inputs["worth"], of_answers(objective, ways, (weights, reference), rewards, inputs))]
    if objective.kind == "orpo":
        inputs["words"] = placeholder("words", losses.shape, table.dtype)
        each.append(ways.summed(losses, inputs["words"], inputs["sequences"]))
    terms = [O.sum(one) for one in each]
    loss = O.add(*terms) if len(terms) > 1 else terms[0]
    return Training(inputs, table, borders, loss, {}, terms=tuple(terms), rewards=rewards, each=tuple(each))


def of_answers(
    objective: Objective,
    ways: PairForward,
    models: tuple[Weights, Weights],
    rewards: Tensor,
    inputs: dict[str, Tensor],
) -> Tensor:
    """Return KTO's loss of each answer, relative to the mean reward of mismatched answers (at least 0)."""
    others = ways.inputs(OTHERS)
    part, sides = (placeholder(name, rewards.shape, rewards.dtype) for name in (f"{OTHERS}part", "sides"))
    now, before = (ways.likely(ways.losses(each, others)[0], others) for each in models)
    usual = O.scale(detached(relu(O.sum(O.mul(O.sub(now, before), part)))), by=objective.beta)
    inputs |= {f"{OTHERS}{name}": each for name, each in others.items()} | {
        f"{OTHERS}part": part,
        "sides": sides,
    }
    return sigmoid(O.mul(sides, O.sub(usual, rewards)))


def of_pairs(objective: Objective, rewards: Tensor, likely: Tensor) -> Tensor:
    """Return the loss of each pair."""
    if objective.kind == "orpo":
        return O.scale(softplus(apart(log_odds(likely))), by=objective.beta)
    wanted = O.fill(
        shape=(), value=objective.gamma if objective.kind == "simpo" else 0.0, dtype=rewards.dtype
    )
    return softplus(O.add(apart(rewards), wanted))


def apart(answers: Tensor) -> Tensor:
    """Return rejected minus chosen, for each pair."""
    half = answers.size // 2
    chosen, rejected = (O.view(answers, slices=((first, first + half, 1),)) for first in (0, half))
    return O.sub(rejected, chosen)
