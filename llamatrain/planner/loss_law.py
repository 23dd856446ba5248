"""Predicts the loss of a new model, and the learning rate and batch that suit a number of tokens.

The law is that of Hoffmann et al. (2022): a loss that no model falls below, and a part each for too few weights
and too little text. Text that is read again counts less each time, as Muennighoff et al. (2023) found. The
constants were fitted to models of 0.1 to 5 million weights that AdaMuon trained; `bench.py minutes` compares what
follows from them with a grid of runs.
"""

import math
from typing import NamedTuple


class LossLaw(NamedTuple):
    """The loss on texts of a kind, in bits per byte."""

    kind: str
    least: float
    by_weights: float  # for a million weights
    by_text: float  # for a million bytes

    def bits(self, weights: int, read: float, text: int) -> float:
        """Return the expected loss of a model by the weights of its blocks and the text it read.

        `read` and `text` are bytes that were read, some of them repeatedly, and bytes of the text.
        """
        few_weights = self.by_weights * (weights / MILLION) ** -WEIGHTS_POWER
        little_text = self.by_text * (useful_bytes(read, text) / MILLION) ** -TEXT_POWER
        return self.least + few_weights + little_text


LAWS = (
    LossLaw("the King James Bible", least=0.867, by_weights=0.120, by_text=0.673),
    LossLaw("Python code", least=0.459, by_weights=0.373, by_text=2.234),
)
MILLION = 1e6
WEIGHTS_POWER, TEXT_POWER = 0.294, 0.507
REPETITIONS = 2.9  # after about so many more passes, a text has little left to teach
PASSES = 3.5  # over a text of a byte per weight, after which a model begins to learn it by heart
RATE = 0.02  # that suits a model of RATE_WIDTH after RATE_TOKENS or less
RATE_WIDTH, RATE_TOKENS = 128, 1e6
WIDTH_POWER, TOKENS_POWER = -0.75, -0.33
STEP_SHARE, STEP_POWER = 1.0, 0.53  # tokens of a step
FIRST_BYTES, BYTES_PER_DOUBLING = 1.7, 0.45  # of a token: in a vocabulary of 256, and for each doubling of it


def mean_bits(weights: int, read: float, text: int) -> float:
    """Return the mean of the losses that the laws expect."""
    return sum(law.bits(weights, read, text) for law in LAWS) / len(LAWS)


def useful_bytes(read: float, text: int) -> float:
    """Return how many bytes of new text teach as much as those that were read, some of them repeatedly."""
    repeated = max(0.0, read / text - 1)
    return min(read, text) + text * REPETITIONS * (1 - math.exp(-repeated / REPETITIONS))


def max_passes(weights: int, text: int) -> float:
    """Return after how many passes over a text a model begins to learn it by heart, and new text worse."""
    return PASSES * math.sqrt(text / weights)


def learning_rate(width: int, tokens: float) -> float:
    """Return the learning rate that suits a model's width and the tokens it reads, to two digits."""
    longer = max(1.0, tokens / RATE_TOKENS)
    rate = RATE * (width / RATE_WIDTH) ** WIDTH_POWER * longer**TOKENS_POWER
    return float(f"{rate:.2g}")


def tokens_per_step(tokens: float) -> float:
    """Return the tokens of a step that suit a number of tokens."""
    return STEP_SHARE * tokens**STEP_POWER


def bytes_per_token(vocabulary: int) -> float:
    """Return how long the tokens of a learned vocabulary are, on average."""
    return max(1.0, BYTES_PER_DOUBLING * math.log2(vocabulary / 256) + FIRST_BYTES)
