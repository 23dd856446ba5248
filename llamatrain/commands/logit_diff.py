"""Compares the logits of a model before and after an export (`export-lora --check`), and judges the difference."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from llamatrain.adapters.options import AdapterOptions
from llamatrain.errors import LlamatrainError

if TYPE_CHECKING:
    import numpy as np

    from llamatrain.adapters.adapter import Adapter
    from llamatrain.gguf.reader import Gguf
    from llamatrain.model.hyperparameters import Hyperparameters
    from llamatrain.model.lora import Weights

MAX_TOKENS = 128  # tokens, at most, whose logits are compared
# shares of the range of the logits: differences up to this come from float arithmetic and 16-bit types
SAME_SHARE = 2e-3
CLOSE_NATS = 0.1  # nats: types of 4 bits and more usually stay below this mean divergence


class LogitsBefore(NamedTuple):
    """Tokens, and the logits behind each of them before the export."""

    tokens: list[int]
    logits: "np.ndarray"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The difference between the logits of an exported model and those of its base with its adapters."""

    largest: float  # difference
    mean: float  # difference
    lowest: float  # logit of the base with its adapters
    highest: float
    tokens: int
    divergence: float  # mean Kullback-Leibler divergence of the distributions of the next token, in nats
    agreeing: int  # tokens behind which both find the same token most likely

    @property
    def verdict(self) -> str:
        """The judgment: same, close or different."""
        if self.largest <= SAME_SHARE * (self.highest - self.lowest):
            return f"same: differences are below {SAME_SHARE:.1%} of the range of the logits"
        agreeing = f"the most likely token is the same at {self.agreeing} of {self.tokens} positions"
        if self.divergence <= CLOSE_NATS:
            return f"close: {agreeing}, which is usual after rounding to fewer bits"
        return f"different: {agreeing}; use a --type with more bits, such as q8_0 or f16"


def logits_before(
    gguf: "Gguf",
    h: "Hyperparameters",
    adapters: "Sequence[Adapter]",
    threads: int,
    text: str,
    note: Callable[[str], None],
) -> LogitsBefore:
    """Compute the logits of the base with its adapters, on the first tokens of a text."""
    from llamatrain.adapters.load_adapted import add_adapters
    from llamatrain.commands.generate import encode_prompt, load_tokenizer
    from llamatrain.data.tokenizer import to_bytes
    from llamatrain.io.mapped_file import verify_unchanged
    from llamatrain.model.hyperparameters import check_predicts_text

    check_predicts_text(h, gguf.path)
    tokens, count = encode_prompt(gguf, load_tokenizer(gguf, h), to_bytes(text), MAX_TOKENS)
    if count > MAX_TOKENS:
        note(f"--check compares the first {MAX_TOKENS} of {count} tokens")
    weights, arrays = add_adapters(gguf, h, adapters, threads)
    with verify_unchanged(gguf.mapped_files):
        return LogitsBefore(tokens, compute_logits(gguf, h, weights, arrays, tokens, threads))


def compare_logits(out: Path, before: LogitsBefore, threads: int) -> Comparison:
    """Compare the exported model with what was computed before."""
    import numpy as np

    from llamatrain.adapters import load_adapted
    from llamatrain.commands.divergence import divergence, log_softmax
    from llamatrain.gguf.reader import open_gguf

    gguf, (tokens, expected) = open_gguf(out), before
    actual = compute_logits(
        gguf, *load_adapted.load_with_adapters(gguf, AdapterOptions(), threads), tokens, threads
    )
    difference = np.abs(actual - expected)
    expected_probs, actual_probs = log_softmax(expected), log_softmax(actual)
    return Comparison(
        largest=float(difference.max()),
        mean=float(difference.mean()),
        lowest=float(expected.min()),
        highest=float(expected.max()),
        tokens=len(tokens),
        divergence=float(divergence(expected_probs, actual_probs).mean()),
        agreeing=int(np.sum(actual.argmax(axis=1) == expected.argmax(axis=1))),
    )


def compute_logits(
    gguf: "Gguf",
    h: "Hyperparameters",
    weights: "Weights",
    arrays: "dict[str, np.ndarray]",
    tokens: list[int],
    threads: int,
) -> "np.ndarray":
    """Compute the logits behind each token."""
    import numpy as np

    from llamatrain.model.load import check_memory
    from llamatrain.sample.decoder import Decoder

    check_memory(
        gguf, Decoder.plan(h, len(tokens), threads, weights=weights).total, "a shorter text for --check"
    )
    decoder = Decoder(h, arrays, ctx=len(tokens), threads=threads, weights=weights)
    logits = np.array([decoder.feed([token]).copy() for token in tokens])
    if not np.isfinite(logits).all():
        raise LlamatrainError(
            f"{gguf.path}: the logits on that text are not finite, so they cannot be compared; the "
            "weights of the "
            "model or of an adapter are damaged or too large",
            code="logits-not-finite",
        )
    return logits
