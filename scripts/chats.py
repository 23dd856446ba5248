"""A chat set from a seed, for measuring: prompts and answers as long as those of gsm8k, of words that can be learned.

Nothing is imported here that a peer's Python may not have. A letter is a token, as the vocabulary of random models has it.
"""

import random
from typing import NamedTuple

WORDS = [a + b for a in "bcdfgklmnp" for b in ("a", "e", "i", "ole", "un", "ask")]
PROMPT, ANSWER = (58, 0.42), (88, 0.5)  # letters at the median, and the deviation of their logarithm
LONGEST = 500  # letters, of both


class Pair(NamedTuple):
    prompt: str
    answer: str


def pairs(count: int, seed: int = 0) -> list[Pair]:
    chance = random.Random(seed)
    return [pair(chance) for _ in range(count)]


def pair(chance: random.Random) -> Pair:
    """An answer goes over the words of its prompt again and again."""
    ask, tell = (
        max(8, round(middle * chance.lognormvariate(0, spread))) for middle, spread in (PROMPT, ANSWER)
    )
    share = min(1.0, LONGEST / (ask + tell))
    ask, tell = int(ask * share), int(tell * share)
    chosen = [chance.choice(WORDS) for _ in range(ask)]
    prompt = " ".join(chosen)[: ask - 1] + ":"
    answer = " ".join(chosen[at % 5] for at in range(tell))[:tell]
    return Pair(prompt, answer)
