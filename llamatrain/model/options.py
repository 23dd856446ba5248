"""The options that say what a new model is made of."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from llamatrain.errors import UsageError

if TYPE_CHECKING:
    from llamatrain.model.hyperparameters import Hyperparameters


class Dial(NamedTuple):
    embd: int
    head: int
    layer: int


SIZES = {
    "tiny": Dial(64, 4, 2),
    "small": Dial(256, 8, 4),
    "medium": Dial(512, 8, 8),
    "large": Dial(768, 12, 12),
}
CTX = 128
VOCAB = "4096"
BYTES = "bytes"


@dataclass(frozen=True)
class ModelOptions:
    size: Annotated[
        Literal["tiny", "small", "medium", "large"],
        "Sets --embd, --head and --layer: 64/4/2, 256/8/4, 512/8/8, 768/12/12.",
    ] = "small"
    embd: Annotated[int | None, "Width of the model; else by --size."] = None
    head: Annotated[int | None, "Attention heads; they divide --embd. Else by --size."] = None
    head_kv: Annotated[int | None, "Key/value heads; they divide --head. Else as many as heads."] = None
    layer: Annotated[int | None, "Blocks; else by --size."] = None
    ff: Annotated[int | None, "Width of the feed-forward part; else 8/3 of --embd, rounded up to 32."] = None
    ctx: Annotated[int | None, "Tokens in a row, and the context of a new model; else 128."] = None
    vocab_size: Annotated[str, "Tokens of a vocabulary learned from the text, fewer if it has fewer; or the word bytes."] = VOCAB
    vocab_from: Annotated[Path | None, "Take the vocabulary of this GGUF file instead of learning one."] = None
    rope_freq_base: Annotated[float, "Frequency base of the rotary positions."] = 10000.0
    rope_freq_scale: Annotated[float, "Positions count this much: 0.5 stretches the context to twice its length."] = 1.0
    norm_rms_eps: Annotated[float, "Epsilon of the RMS norms."] = 1e-5
    tie_embeddings: Annotated[bool, "One matrix serves as embeddings and as output."] = False

    def __post_init__(self) -> None:
        for name in ("embd", "head", "head_kv", "layer", "ff", "ctx"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} {value} cannot be; it takes 1 or more")
        if self.vocab_size != BYTES and not (self.vocab_size.isdecimal() and len(self.vocab_size) < 10):
            raise UsageError(f"--vocab-size {self.vocab_size[:40]!r} is no number of tokens, such as 4096, nor the word {BYTES}")
        if self.vocab_from and self.vocab_size != VOCAB:
            raise UsageError("--vocab-size and --vocab-from exclude each other: learn a vocabulary, or take one")
        if not 0 < self.rope_freq_scale < float("inf"):
            raise UsageError(f"--rope-freq-scale {self.rope_freq_scale:g} must be more than 0, such as 0.5")
        embd, head = self.embd or SIZES[self.size].embd, self.head or SIZES[self.size].head
        if embd % head:
            raise UsageError(f"{head} heads do not divide a width of {embd} (--head, --embd)")
        if embd // head % 2:
            raise UsageError(f"a head of {embd} / {head} = {embd // head} elements is odd; they turn in pairs (--head, --embd)")

    @property
    def row(self) -> int:
        return self.ctx or CTX

    def hyperparameters(self, vocab: int) -> "Hyperparameters":
        from llamatrain.model.architectures import USUAL, find
        from llamatrain.model.hyperparameters import Hyperparameters
        from llamatrain.model.rope import Rope

        dial = SIZES[self.size]
        embd, heads = self.embd or dial.embd, self.head or dial.head
        factor = 1 / self.rope_freq_scale
        with as_options():
            return Hyperparameters(
                architecture=find(USUAL),
                vocab=vocab,
                embd=embd,
                layers=self.layer or dial.layer,
                heads=heads,
                kv_heads=self.head_kv or heads,
                ff=self.ff or -(-8 * embd // 3 // 32) * 32,
                ctx=self.row,
                head_size=embd // heads,
                rope=Rope(embd // heads, base=self.rope_freq_base, kind="linear" if factor != 1 else "none", factor=factor),
                rms_eps=self.norm_rms_eps,
                tied=self.tie_embeddings,
            )


FLAGS = {
    "vocab": "--vocab-size",
    "layers": "--layer",
    "heads": "--head",
    "kv_heads": "--head-kv",
    "rms_eps": "--norm-rms-eps",
    "base": "--rope-freq-base",
}


@contextmanager
def as_options() -> Iterator[None]:
    """What a model cannot have is told by the option that says it."""
    from llamatrain.model.unfit import Unfit

    try:
        yield
    except Unfit as error:
        raise UsageError(error.named(FLAGS.get(error.field, f"--{error.field}"))) from None
