"""Predicts the loss of a new model, and the learning rate and batch that suit a number of tokens.

The law is that of Hoffmann et al. (2022): a loss that no model falls below, and a part each for too few weights
and too little text. Text that is read again counts less each time, as Muennighoff et al. (2023) found. All
constants were fitted to models of 0.1 to 5 million weights that AdaMuon trained on the King James Bible and on
Python code. Losses are relative to the size of the deflated text, which says how regular a text is.
"""

import math

LEAST, BY_WEIGHTS, BY_TEXT = 0.36, 4.2, 20.0  # the parts of the loss
WEIGHTS_POWER, TEXT_POWER = 0.30, 0.33
REPETITIONS = 15.0  # after about so many more passes, a text has little left to teach
RATE, RATE_TOKENS, RATE_POWER = 0.012, 2.4e6, -0.3  # the rate that suits a number of tokens
STEP_SHARE, STEP_POWER = 1.2, 0.53  # tokens of a step
FIRST_BYTES, BYTES_PER_DOUBLING = 1.6, 0.5  # of a token: in a vocabulary of 256, and for each doubling of it


def relative_loss(weights: int, read: float, text: int) -> float:
    """Return the expected loss after `read` bytes of a text, relative to that of the deflated text.

    `weights` are those of the blocks. The result is at most 1.
    """
    loss = LEAST + BY_WEIGHTS * weights**-WEIGHTS_POWER + BY_TEXT * useful_bytes(read, text) ** -TEXT_POWER
    return min(1.0, loss)


def useful_bytes(read: float, text: int) -> float:
    """Return how many bytes of new text teach as much as those that were read, some of them repeatedly."""
    repeated = max(0.0, read / text - 1)
    return min(read, text) + text * REPETITIONS * (1 - math.exp(-repeated / REPETITIONS))


def learning_rate(tokens: float) -> float:
    """Return the learning rate that suits a number of tokens, to two digits."""
    return float(f"{RATE * (tokens / RATE_TOKENS) ** RATE_POWER:.2g}")


def tokens_per_step(tokens: float) -> float:
    """Return the tokens of a step that suit a number of tokens."""
    return STEP_SHARE * tokens**STEP_POWER


def bytes_per_token(vocabulary: int) -> float:
    """Return how long the tokens of a learned vocabulary are, on average."""
    return max(1.0, BYTES_PER_DOUBLING * math.log2(vocabulary / 256) + FIRST_BYTES)
