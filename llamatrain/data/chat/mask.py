"""Tokens of a document, with a mark on what is trained."""

from typing import NamedTuple

import numpy as np

NOTHING = (np.zeros(0, np.int32), np.zeros(0, np.uint8))  # a document that is counted, and skipped


class MarkedTokens(NamedTuple):
    tokens: np.ndarray
    marks: np.ndarray  # 1 where trained
    single: bool  # one row at most


NEITHER = MarkedTokens(*NOTHING, single=True)


def last_answer(samples: list[MarkedTokens]) -> MarkedTokens:
    """What is compared of a conversation."""
    *_, (tokens, marks, _) = samples
    told = np.flatnonzero(np.diff(marks, prepend=0))  # where answers begin and end
    before = int(told[-2 if len(told) % 2 == 0 else -1]) if len(told) else 0
    marks[:before] = 0
    return MarkedTokens(tokens, marks, single=True)
