"""The result of an evaluation."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llamatrain.commands.choices import ChoiceScore
    from llamatrain.commands.exact_match import MatchScore
    from llamatrain.train.evaluate import LossMeter

PREFERENCE_ONLY = ("margin", "reward_chosen", "reward_rejected", "answers")
TEXT_ONLY = ("perplexity", "bits_per_byte")
LISTS = ("choices", "exact_match")  # of results of files
COMPARISON_ONLY = ("kl_divergence", "kl_divergence_error", "agreement", "agreement_error")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of an evaluation: means over the tokens that count."""

    loss: float | None = None  # None: no data
    perplexity: float | None = None  # None: answers are compared
    bits_per_byte: float | None = None  # None: its tokens stand for no text
    tokens: int = 0
    loss_error: float | None = (
        None  # the standard error of the mean; None: it takes two samples, pairs or answers
    )
    accuracy: float | None = (
        None  # the part of the tokens that were held likeliest, or of the answers judged as they should be
    )
    accuracy_error: float | None = None
    margin: float | None = None  # reward margin of compared answers
    reward_chosen: float | None = None
    reward_rejected: float | None = None
    answers: int | None = None  # or pairs
    kl_divergence: float | None = None  # KL(base || model) per token in nats, with `compare`
    kl_divergence_error: float | None = None
    agreement: float | None = None  # the part of the tokens for which base and model hold the same likeliest
    agreement_error: float | None = None
    choices: "tuple[ChoiceScore, ...]" = ()  # for each file of questions
    exact_match: "tuple[MatchScore, ...]" = ()  # for each file of prompts with answers
    base: "Evaluation | None" = None  # of the model that is compared with
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the values by name as JSON stores them, without those of other kinds of evaluation."""
        omitted = {"notes", "base", *LISTS, *(PREFERENCE_ONLY if self.answers is None else TEXT_ONLY)}
        omitted |= set() if self.base else {*COMPARISON_ONLY}
        omitted |= {field.name for field in fields(self)} if self.loss is None else set()
        values = finite_or_none({name: value for name, value in vars(self).items() if name not in omitted})
        for name in LISTS:
            values |= {name: [score.as_json() for score in scores]} if (scores := getattr(self, name)) else {}
        return {**values, **({"base": self.base.as_json()} if self.base else {})}


@dataclass(frozen=True, kw_only=True)
class Retrieval(Evaluation):
    """The result for embeddings: how well they find the texts that answer queries, among all texts of the data.

    The loss is that of training, with as many rows as a batch has.
    """

    recall_at_1: float
    recall_at_5: float
    recall_at_10: float
    mrr_at_10: float  # the mean of one divided by the rank of the first text that answers the query
    ndcg_at_10: float
    queries: int
    candidates: int

    def as_json(self) -> dict[str, Any]:
        """Return the values by name as JSON stores them, without those of other kinds of evaluation."""
        names = [
            "loss",
            "tokens",
            *(field.name for field in fields(self) if field.name in vars(Retrieval)["__annotations__"]),
        ]
        return finite_or_none({name: getattr(self, name) for name in names})


def finite_or_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with None in place of numbers that JSON does not have."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def summarize(meter: "LossMeter", text_bytes: int) -> Evaluation:
    """Return the result from the losses and the number of bytes of text."""
    from llamatrain.platform.terminal import log_line

    score, notes = meter.score, list[str]()
    loss, alone = score.loss, score.answers is None
    if not math.isfinite(loss):
        notes.append(f"the loss is {loss}: the weights of the model are damaged or too large")
        log_line(f"warning: {notes[0]}")
    return Evaluation(
        loss=loss,
        perplexity=math.exp(min(loss, 700)) if alone else None,
        bits_per_byte=math.fsum(meter.losses) / math.log(2) / text_bytes if text_bytes and alone else None,
        tokens=score.tokens,
        loss_error=score.loss_error,
        accuracy=score.accuracy,
        accuracy_error=score.accuracy_error,
        margin=score.margin,
        reward_chosen=score.reward_chosen,
        reward_rejected=score.reward_rejected,
        answers=score.answers,
        notes=tuple(notes),
    )
