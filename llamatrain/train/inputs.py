"""The arrays of the inputs of a step's graph, by input name."""

import numpy as np

from llamatrain.preference.forward import MISMATCHED
from llamatrain.preference.inputs import PREFERENCE_INPUTS, InputFunction, for_mismatched

TOKEN_INPUTS: dict[str, InputFunction] = {
    "tokens": lambda source: source.batch.tokens,
    "positions": lambda source: source.batch.positions,
    "starts": lambda source: source.batch.starts,
    "scored_indices": lambda source: source.scored_indices,
    "targets": lambda source: source.take(source.batch.targets),
}
MISMATCHED_INPUTS = (*TOKEN_INPUTS, "sequences", "shares")

# The array of each input. Arrays of tokens and answers may be shorter than the input: the rest is zero.
INPUTS: dict[str, InputFunction] = {
    **TOKEN_INPUTS,
    "weights": lambda source: source.take(source.batch.weights) / np.float32(source.totals.weight),
    "dropout": lambda source: np.array(source.dropout_key),
    **PREFERENCE_INPUTS,
    **{
        f"{MISMATCHED}{name}": for_mismatched((TOKEN_INPUTS | PREFERENCE_INPUTS)[name])
        for name in MISMATCHED_INPUTS
    },
}
# Attention masks are computed in chunks, from the first token that each token attends to.
MASKS: dict[str, InputFunction] = {
    "mask": lambda source: source.batch.starts,
    f"{MISMATCHED}mask": lambda source: source.mismatched.batch.starts,
}
STEP_INPUTS = {"schedule"}  # written once per step, by `BoundGraph.set_schedule`
