"""The generated answers of a step, and the batches that they are trained in."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from llamatrain.data.batches import Batch, RolloutBatch, Row, Segment, collate_rows
from llamatrain.grpo.advantages import compute_advantages, compute_shares
from llamatrain.grpo.settings import Grpo


@dataclass(frozen=True)
class GeneratedAnswer:
    """The tokens of a prompt and of an answer to it."""

    prompt: Sequence[int]
    tokens: Sequence[int]  # with the token that ends it, if there is one
    is_truncated: bool
    reward: float = 0.0
    log_probs: Sequence[float] = ()  # of the tokens when they were generated; empty: not needed


Rollouts = list[GeneratedAnswer | None]  # of all rows of a step, in their order; None: the row is padding


def make_batches(
    rollouts: Rollouts, settings: Grpo, *, rows: int, lengths: Sequence[int], padding: int
) -> list[Batch]:
    """Return the micro-batches of a step, with some rows each, of the shortest of some lengths."""
    present = [answer for answer in rollouts if answer]
    advantages = iter(compute_advantages(np.array([answer.reward for answer in present]), settings))
    sizes = [trained_size(answer, settings) for answer in present]
    shares = iter(compute_shares(np.array(sizes), settings))
    numbers = [(next(advantages), next(shares)) if answer else (0.0, 0.0) for answer in rollouts]
    batches = []
    for first in range(0, len(rollouts), rows):
        answers = rollouts[first : first + rows]
        longest = max(
            (len(answer.prompt) + len(answer.tokens) - 1 for answer in answers if answer), default=0
        )
        length = next(length for length in lengths if length >= longest)
        batch = collate_rows([to_row(answer, settings) for answer in answers], length, padding)
        batches.append(replace(batch, rollouts=to_rollouts(answers, numbers[first : first + rows], batch)))
    return batches


def trained_size(answer: GeneratedAnswer, settings: Grpo) -> int:
    """Return how many tokens of an answer are trained."""
    return 0 if answer.is_truncated and settings.mask_truncated_completions else len(answer.tokens)


def to_row(answer: GeneratedAnswer | None, settings: Grpo) -> Row:
    """Return the row of an answer, whose tokens have the weight 1."""
    if answer is None:
        return []
    tokens = np.array([*answer.prompt, *answer.tokens], np.int32)
    weights = np.zeros(len(tokens) - 1, np.float32)
    weights[len(answer.prompt) - 1 :] = trained_size(answer, settings) > 0
    return [Segment(tokens[:-1], tokens[1:], weights)]


def to_rollouts(
    answers: Sequence[GeneratedAnswer | None], numbers: Sequence[tuple[float, float]], batch: Batch
) -> RolloutBatch:
    """Return the arrays of answers; `numbers` has the advantage of each, and the share of each of its tokens."""
    advantages, shares = (
        np.broadcast_to(np.array(column, np.float32)[:, None], batch.weights.shape)
        for column in zip(*numbers, strict=True)
    )
    log_probs = np.zeros(batch.weights.shape, np.float32)
    for row, answer in zip(log_probs, answers, strict=True):
        if answer and answer.log_probs:
            first = len(answer.prompt) - 1
            row[first : first + len(answer.tokens)] = answer.log_probs
    return RolloutBatch(
        shares=shares * (batch.weights > 0),
        advantages=advantages,
        old_log_probs=log_probs,
        rewards=np.array([answer.reward if answer else np.nan for answer in answers]),
        sizes=np.array([len(answer.tokens) if answer else 0 for answer in answers]),
        truncated=np.array([answer is not None and answer.is_truncated for answer in answers]),
    )
