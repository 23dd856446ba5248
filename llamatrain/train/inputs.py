"""The arrays of the inputs of a step's graph, by input name."""

from collections.abc import Callable

import numpy as np

from llamatrain.contrastive.inputs import TEXT_INPUTS
from llamatrain.data.batches import Batch
from llamatrain.grpo.inputs import ROLLOUT_INPUTS
from llamatrain.model.visible_keys import last_tokens, visible_range
from llamatrain.preference.forward import MISMATCHED
from llamatrain.preference.inputs import PREFERENCE_INPUTS, InputFunction, InputSource, for_mismatched

TOKEN_INPUTS: dict[str, InputFunction] = {
    "tokens": lambda source: source.batch.tokens,
    "positions": lambda source: source.batch.positions,
    "starts": lambda source: source.batch.starts,
    "scored_indices": lambda source: source.scored_indices,
    "targets": lambda source: source.take(source.batch.targets),
}
MISMATCHED_INPUTS = (*TOKEN_INPUTS, "sequences", "shares")


def of_batch(function: Callable[[Batch], np.ndarray]) -> InputFunction:
    """Return a function of a batch as one of its source."""
    return lambda source: function(source.batch)


def of_tokens(function: Callable[[Batch], np.ndarray]) -> InputFunction:
    """Return a function of all tokens of a batch as one of those that are scored."""
    return lambda source: source.take(function(source.batch))


# The array of each input. Arrays of tokens and answers may be shorter than the input: the rest is zero.
INPUTS: dict[str, InputFunction] = {
    **TOKEN_INPUTS,
    "weights": lambda source: source.take(source.batch.weights) / np.float32(source.totals.weight),
    "dropout": lambda source: np.array(source.dropout_key),
    **PREFERENCE_INPUTS,
    **{name: of_batch(function) for name, function in TEXT_INPUTS.items()},
    **{name: of_tokens(function) for name, function in ROLLOUT_INPUTS.items()},
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


def input_array(name: str, source: InputSource) -> np.ndarray:
    """Return the array of an input. Those without an entry in INPUTS are the first or last tokens of windows."""
    if function := INPUTS.get(name):
        return function(source)
    starts = source.batch.starts
    return visible_range(name, starts, last_tokens(starts))
