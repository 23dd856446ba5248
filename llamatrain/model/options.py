"""Options that define a new model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from llamatrain.config.common import CTX as ROW
from llamatrain.config.options import Option, OptionError, Options
from llamatrain.errors import UsageError
from llamatrain.model.architectures import DEFAULT, find_architecture, text_model_names
from llamatrain.model.limits import MAX_LAYERS, MAX_SIZE, BadHyperparameter

if TYPE_CHECKING:
    from llamatrain.model.architecture import Architecture
    from llamatrain.model.hyperparameters import Hyperparameters


class SizePreset(NamedTuple):
    """The sizes that --size sets."""

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
EXPERTS, EXPERTS_USED = 8, 2
MAX_EXPERTS = 1 << 16
DEFAULT_VOCAB = "4096"
BYTES = "bytes"


def is_vocab_size(text: str) -> bool:
    """Return True if a text is a vocabulary size."""
    return text == BYTES or (text.isdecimal() and len(text) < 10)


@dataclass(frozen=True)
class ModelOptions(Options, panel="A new model"):
    """Options of a new model's architecture and sizes."""

    arch: Annotated[
        str, Option(f"Architecture: {', '.join(text_model_names())}.", unit="NAME", new_model=True)
    ] = DEFAULT
    size: Annotated[
        Literal["tiny", "small", "medium", "large"],
        Option(
            "Sets --embd, --head and --layer: tiny 64/4/2, small 256/8/4, medium 512/8/8, large 768/12/12.",
            new_model=True,
        ),
    ] = "small"
    embd: Annotated[
        int | None, Option("Width of the model; default: by --size.", least=1, most=MAX_SIZE, new_model=True)
    ] = None
    head: Annotated[
        int | None,
        Option(
            "Attention heads; must divide --embd. Default: by --size.", least=1, most=MAX_SIZE, new_model=True
        ),
    ] = None
    head_kv: Annotated[
        int | None,
        Option(
            "Key/value heads; must divide --head. Default: the number of heads.",
            least=1,
            most=MAX_SIZE,
            new_model=True,
        ),
    ] = None
    head_size: Annotated[
        int | None,
        Option(
            "Width of a head, for architectures where it is independent; default: --embd / --head.",
            least=2,
            most=MAX_SIZE,
            new_model=True,
        ),
    ] = None
    layer: Annotated[
        int | None,
        Option("Transformer blocks; default: by --size.", least=1, most=MAX_LAYERS, new_model=True),
    ] = None
    ff: Annotated[
        int | None,
        Option(
            "Width of the feed-forward layer, or of the experts that a token uses, together; "
            "default: 8/3 of --embd, rounded up to 32.",
            least=1,
            most=MAX_SIZE,
            new_model=True,
        ),
    ] = None
    experts: Annotated[
        int | None,
        Option(
            "Experts of each block, for architectures that have them; default: 8.",
            least=1,
            most=MAX_EXPERTS,
            example="8",
            new_model=True,
        ),
    ] = None
    experts_used: Annotated[
        int | None,
        Option(
            "Experts that each token uses; default: 2.",
            least=1,
            most=MAX_EXPERTS,
            example="2",
            new_model=True,
        ),
    ] = None
    ctx: Annotated[
        int | None,
        replace(ROW, sentence="Tokens per row, and context of the new model; default: 128.", most=MAX_SIZE),
    ] = None
    vocab_size: Annotated[
        str,
        Option(
            "Size of the vocabulary that is learned from the text (fewer if the text has fewer); or bytes.",
            unit="TOKENS",
            accepts=is_vocab_size,
            takes=f"a number of tokens, such as 4096, or the word {BYTES}",
            excludes=(("vocab_from", "a vocabulary is either learned or taken from a file"),),
            new_model=True,
        ),
    ] = DEFAULT_VOCAB
    vocab_from: Annotated[
        Path | None, Option("Take the vocabulary of this GGUF file instead of learning one.", new_model=True)
    ] = None
    rope_freq_base: Annotated[
        float, Option("RoPE frequency base.", least=1, example="10000", new_model=True)
    ] = 10000.0
    rope_freq_scale: Annotated[
        float,
        Option(  # outside, a float32 is infinite or 0
            "RoPE frequency scale: 0.5 stretches the context to twice its length.",
            least=1e-38,
            most=1e38,
            example="0.5",
            new_model=True,
        ),
    ] = 1.0
    norm_rms_eps: Annotated[
        float, Option("Epsilon of the RMS norms.", above=0, below=1, example="1e-5", new_model=True)
    ] = 1e-5
    tie_embeddings: Annotated[bool, Option("Use one matrix for embeddings and output.", new_model=True)] = (
        False
    )
    embd_std: Annotated[
        float | None,
        Option(
            "Standard deviation of the initial embeddings; default: 1 / the root of --embd. AdaMuon learns "
            "faster with 0.02.",
            unit="NUMBER",
            above=0,
            most=1e3,
            example="0.02",
            new_model=True,
        ),
    ] = None
    minutes: Annotated[
        float | None,
        Option(
            "Choose sizes, vocabulary, optimizer, batch, learning rate and steps, unless they are given, so that "
            "training on this machine learns most in this time.",
            above=0,
            most=1e6,
            example="5",
            transient=True,
            new_model=True,
        ),
    ] = None
    lora_r: Annotated[
        int | None,
        Option(
            "Make the matrices of attention and output products of factors of this rank.",
            unit="RANK",
            least=1,
            most=MAX_SIZE,
            new_model=True,
        ),
    ] = None

    def validate(self) -> None:
        """Raise OptionError if the sizes do not fit together."""
        if self.arch != DEFAULT:
            self.architecture()
        embd, head = self.embd or SIZES[self.size].embd, self.head or SIZES[self.size].head
        size = self.head_size or embd // head
        if embd % head and not self.head_size:
            problem = f"{head} heads do not divide a width of {embd}"
        elif size % 2 and self.head_size:
            raise OptionError(
                lambda spelt: (
                    f"{spelt('head_size')} must be even, because elements rotate in pairs (got {size})"
                ),
                code="invalid-head-size",
            )
        elif size % 2:
            problem = (
                f"a head of {embd} / {head} = {size} elements must be even, because elements rotate in pairs"
            )
        elif self.head_kv and head % self.head_kv:
            raise OptionError(
                lambda spelt: f"{spelt('head_kv')} must divide the {head} heads (got {self.head_kv})",
                code="invalid-hyperparameter",
            )
        else:
            return
        raise OptionError(
            lambda spelt: f"{problem} ({spelt('head')}, {spelt('embd')})", code="invalid-head-size"
        )

    @property
    def row_length(self) -> int:
        """The tokens in a row."""
        return self.ctx or CTX

    def architecture(self) -> "Architecture[Hyperparameters, Any]":
        """Return the architecture of --arch."""
        try:
            architecture = find_architecture(self.arch)
        except UsageError as error:
            message, code = str(error), error.code
            raise OptionError(lambda spelt: f"{spelt('arch')}: {message}", code=code) from None
        if not architecture.causal:
            raise OptionError(
                lambda spelt: (
                    f"{spelt('arch')} must be an architecture that predicts text (got {architecture.name}, "
                    "which is for embeddings); use another one"
                ),
                code="predicts-no-text",
            )
        if architecture.tied is False and self.tie_embeddings:
            raise OptionError(
                lambda spelt: (
                    f"{spelt('tie_embeddings')} is not possible: the embeddings of {architecture.name} "
                    "are not tied; leave it out"
                ),
                code="embeddings-not-tied",
            )
        given = [name for name in ("experts", "experts_used") if getattr(self, name) is not None]
        if given and not architecture.has_experts:
            raise OptionError(
                lambda spelt: (
                    f"{spelt(given[0])} has no effect on {spelt('arch')} {architecture.name}, which has no "
                    "experts; leave it out, or choose an architecture whose name ends in moe"
                ),
                code="unused-option",
            )
        return architecture

    def hyperparameters(self, vocab: int) -> "Hyperparameters":
        """Return the hyperparameters of a new model with a vocabulary of `vocab` tokens."""
        from llamatrain.model.hyperparameters import Hyperparameters, default_extra, default_lists
        from llamatrain.model.rope import Rope

        preset, architecture = SIZES[self.size], self.architecture()
        embd, heads = self.embd or preset.embd, self.head or preset.head
        size, factor = self.head_size or embd // heads, 1 / self.rope_freq_scale
        layers, kv_heads = self.layer or preset.layer, self.head_kv or heads
        rope = Rope(size, base=self.rope_freq_base, kind="linear" if factor != 1 else "none", factor=factor)
        ff = self.ff or round_up(8 * embd // 3)
        used = self.experts_used or EXPERTS_USED
        sizes = {
            "head_size": size,
            "embd": embd,
            "experts": self.experts or EXPERTS,
            "experts_used": used,
            "expert_ff": round_up(ff // used),
        }
        with name_by_option():
            return Hyperparameters(
                architecture=architecture,
                vocab=vocab,
                embd=embd,
                layers=layers,
                heads=heads,
                kv_heads=kv_heads,
                ff=sizes["expert_ff"] if architecture.expert_has_ff else ff,
                ctx=self.row_length,
                head_size=size,
                rope=architecture.new_model_rope(rope),
                rms_eps=self.norm_rms_eps,
                tied=self.tie_embeddings or architecture.ties_by_default
                if architecture.tied is None
                else architecture.tied,
                optional_weights=architecture.new_model_weights,
                extra=default_extra(architecture, sizes),
                by_block=architecture.new_model_blocks(layers, kv_heads),
                lists=default_lists(architecture, layers, size),
            )


def round_up(width: int) -> int:
    """Round a width up to a multiple of 32."""
    return -(-width // 32) * 32


OPTION_NAMES = {  # by the hyperparameter's name
    "vocab": "vocab_size",
    "layers": "layer",
    "heads": "head",
    "kv_heads": "head_kv",
    "head_size": "head_size",
    "rms_eps": "norm_rms_eps",
    "base": "rope_freq_base",
}


@contextmanager
def name_by_option() -> Iterator[None]:
    """Convert a BadHyperparameter into an error that names the option."""
    try:
        yield
    except BadHyperparameter as error:
        unfit = error
        raise OptionError(
            lambda spelt: unfit.describe(spelt(OPTION_NAMES.get(unfit.field, unfit.field))), code=unfit.code
        ) from None
