"""Synthetic chats from a seed: prompts and answers as long as gsm8k's, of words that can be learned.

A letter is a token, as in the vocabulary of random models. Imports only the standard library, because the
Python of a peer has nothing else for sure.
"""

import random
from typing import NamedTuple

WORDS = [a + b for a in "bcdfgklmnp" for b in ("a", "e", "i", "ole", "un", "ask")]
PROMPT, ANSWER = (58, 0.42), (88, 0.5)  # median of letters, and the deviation of their logarithm
MAX_LETTERS = 500  # of prompt and answer


class Pair(NamedTuple):
    """A prompt and its answer."""

    prompt: str
    answer: str


def make_pairs(count: int, seed: int = 0) -> list[Pair]:
    """Return a number of pairs."""
    rng = random.Random(seed)
    return [make_pair(rng) for _ in range(count)]


def make_pair(rng: random.Random) -> Pair:
    """Return a pair whose answer repeats the first words of its prompt."""
    prompt_length, answer_length = (
        max(8, round(middle * rng.lognormvariate(0, spread))) for middle, spread in (PROMPT, ANSWER)
    )
    share = min(1.0, MAX_LETTERS / (prompt_length + answer_length))
    prompt_length = int(prompt_length * share)
    answer_length = int(answer_length * share)
    words = [rng.choice(WORDS) for _ in range(prompt_length)]
    prompt = " ".join(words)[: prompt_length - 1] + ":"
    answer = " ".join(words[index % 5] for index in range(answer_length))[:answer_length]
    return Pair(prompt, answer)
