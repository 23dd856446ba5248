"""The options that say what a new model is made of."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from llamatrain.config.common import CTX as ROW
from llamatrain.config.options import Option, OptionError, Options
from llamatrain.errors import UsageError
from llamatrain.model.architectures import USUAL, find, supported
from llamatrain.model.limits import DEEPEST, LARGEST, BadHyperparameter

if TYPE_CHECKING:
    from llamatrain.model.architecture import Architecture
    from llamatrain.model.hyperparameters import Hyperparameters


class SizePreset(NamedTuple):
    embd: int
    head: int
    layer: int


SIZES = {
    "tiny": SizePreset(64, 4, 2),
    "small": SizePreset(256, 8, 4),
    "medium": SizePreset(512, 8, 8),
    "large": SizePreset(768, 12, 12),
}
CTX = 128
VOCAB = "4096"
BYTES = "bytes"


def is_size(text: str) -> bool:
    """Of a vocabulary."""
    return text == BYTES or (text.isdecimal() and len(text) < 10)


@dataclass(frozen=True)
class ModelOptions(Options, panel="A new model"):
    arch: Annotated[str, Option(f"What it is built like: {', '.join(supported())}.", unit="NAME")] = USUAL
    size: Annotated[
        Literal["tiny", "small", "medium", "large"],
        Option("Sets --embd, --head and --layer: 64/4/2, 256/8/4, 512/8/8, 768/12/12."),
    ] = "small"
    embd: Annotated[int | None, Option("Width of the model; else by --size.", least=1, most=LARGEST)] = None
    head: Annotated[
        int | None, Option("Attention heads; they divide --embd. Else by --size.", least=1, most=LARGEST)
    ] = None
    head_kv: Annotated[
        int | None,
        Option("Key/value heads; they divide --head. Else as many as heads.", least=1, most=LARGEST),
    ] = None
    head_size: Annotated[
        int | None,
        Option(
            "Width of a head, for those that have one of their own; else --embd / --head.",
            least=2,
            most=LARGEST,
        ),
    ] = None
    layer: Annotated[int | None, Option("Blocks; else by --size.", least=1, most=DEEPEST)] = None
    ff: Annotated[
        int | None,
        Option(
            "Width of the feed-forward part; else 8/3 of --embd, rounded up to 32.", least=1, most=LARGEST
        ),
    ] = None
    ctx: Annotated[
        int | None,
        replace(ROW, sentence="Tokens in a row, and the context of a new model; else 128.", most=LARGEST),
    ] = None
    vocab_size: Annotated[
        str,
        Option(
            "Tokens of a vocabulary learned from the text, fewer if it has fewer; or the word bytes.",
            unit="TOKENS",
            accepts=is_size,
            takes=f"a number of tokens, such as 4096, or the word {BYTES}",
            excludes=(("vocab_from", "learn a vocabulary, or take one"),),
        ),
    ] = VOCAB
    vocab_from: Annotated[
        Path | None, Option("Take the vocabulary of this GGUF file instead of learning one.")
    ] = None
    rope_freq_base: Annotated[
        float, Option("Frequency base of the rotary positions.", least=1, example="10000")
    ] = 10000.0
    rope_freq_scale: Annotated[
        float,
        Option(  # what lies beyond is no number, or 0, as files have it
            "Positions count this much: 0.5 stretches the context to twice its length.",
            least=1e-38,
            most=1e38,
            example="0.5",
        ),
    ] = 1.0
    norm_rms_eps: Annotated[float, Option("Epsilon of the RMS norms.", above=0, below=1, example="1e-5")] = (
        1e-5
    )
    tie_embeddings: Annotated[bool, Option("One matrix serves as embeddings and as output.")] = False
    lora_r: Annotated[
        int | None,
        Option(
            "The matrices of attention and output are products of factors of this rank.",
            unit="RANK",
            least=1,
            most=LARGEST,
        ),
    ] = None

    def agree(self) -> None:
        if self.arch != USUAL:
            self.architecture()
        embd, head = self.embd or SIZES[self.size].embd, self.head or SIZES[self.size].head
        size = self.head_size or embd // head
        if embd % head and not self.head_size:
            told = f"{head} heads do not divide a width of {embd}"
        elif size % 2 and self.head_size:
            raise OptionError(
                lambda spelt: f"{spelt('head_size')} {size} is odd; a head's elements turn in pairs"
            )
        elif size % 2:
            told = f"a head of {embd} / {head} = {size} elements is odd; they turn in pairs"
        elif self.head_kv and head % self.head_kv:
            kv = f"{self.head_kv} cannot be; it takes what divides the {head} heads"
            raise OptionError(lambda spelt: f"{spelt('head_kv')} {kv}")
        else:
            return
        raise OptionError(lambda spelt: f"{told} ({spelt('head')}, {spelt('embd')})")

    @property
    def row(self) -> int:
        return self.ctx or CTX

    def architecture(self) -> "Architecture[Hyperparameters, Any]":
        try:
            found = find(self.arch)
        except UsageError as error:
            told = str(error)
            raise OptionError(lambda spelt: f"{spelt('arch')}: {told}") from None
        if found.tied is False and self.tie_embeddings:
            raise OptionError(
                lambda spelt: f"{spelt('tie_embeddings')}: those of {found.name} are not tied; leave it out"
            )
        return found

    def hyperparameters(self, vocab: int) -> "Hyperparameters":
        from llamatrain.model.hyperparameters import Hyperparameters, own_of_new
        from llamatrain.model.rope import Rope

        dial, architecture = SIZES[self.size], self.architecture()
        embd, heads = self.embd or dial.embd, self.head or dial.head
        size, factor = self.head_size or embd // heads, 1 / self.rope_freq_scale
        with as_options():
            return Hyperparameters(
                architecture=architecture,
                vocab=vocab,
                embd=embd,
                layers=self.layer or dial.layer,
                heads=heads,
                kv_heads=self.head_kv or heads,
                ff=self.ff or -(-8 * embd // 3 // 32) * 32,
                ctx=self.row,
                head_size=size,
                rope=Rope(
                    size, base=self.rope_freq_base, kind="linear" if factor != 1 else "none", factor=factor
                ),
                rms_eps=self.norm_rms_eps,
                tied=self.tie_embeddings or architecture.ties
                if architecture.tied is None
                else architecture.tied,
                own=own_of_new(architecture),
            )


OPTIONS = {  # by what a model calls their numbers
    "vocab": "vocab_size",
    "layers": "layer",
    "heads": "head",
    "kv_heads": "head_kv",
    "head_size": "head_size",
    "rms_eps": "norm_rms_eps",
    "base": "rope_freq_base",
}


@contextmanager
def as_options() -> Iterator[None]:
    """What a model cannot have is told by the option that says it."""
    try:
        yield
    except BadHyperparameter as error:
        unfit = error
        raise OptionError(lambda spelt: unfit.named(spelt(OPTIONS.get(unfit.field, unfit.field)))) from None
