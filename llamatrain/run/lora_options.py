"""The options of `finetune`, and the ranks of an adapter's weights."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from llamatrain.adapters.options import LARGEST
from llamatrain.config.common import CTX
from llamatrain.config.messages import shorten
from llamatrain.config.options import Option, OptionError, Options, excluded_by
from llamatrain.errors import UsageError

if TYPE_CHECKING:
    from llamatrain.model.hyperparameters import Hyperparameters

RANK, HIGHEST = 8, 1 << 16
ALPHA = 8.0  # the same for all ranks, so that they suit the same learning rate
RANK_OF_NORMS = 1  # the most that one row can have
FACTORS = (1e-9, LARGEST)  # bounds of alpha and ratios, so that the scales of a written adapter can be read
NOT_FULL = excluded_by("full")
NEW_ADAPTER = excluded_by("lora_init")
NOT_ROUNDED = excluded_by("quant_aware")


def is_rank(text: str) -> bool:
    """Return True if a text is WEIGHT=RANK."""
    name, _, number = text.partition("=")
    return bool(name) and number.isdecimal() and len(number) < 6 and 1 <= int(number) <= HIGHEST


# options that several commands have
LORA_R = Option("Rank of the adapter.", unit="RANK", least=1, most=HIGHEST, when=(NOT_FULL, NEW_ADAPTER))
TARGET = Option(
    "Weights that get an adapter: attn_q, blk.0-3.ffn_down, blk.8-, output, token_embd, or all of a group: "
    "attention, experts, shared (experts), router, norms; default: all linear ones but experts and routers.",
    unit="WEIGHTS",
    when=(NOT_FULL, NEW_ADAPTER),
)
LORA_RANK_OF = Option(
    "Rank of one weight, such as attn_q=16, blk.0.ffn_up=4 or experts=2; may be repeated. Norms have rank 1.",
    unit="WEIGHT=RANK",
    accepts=is_rank,
    takes="a weight and a rank, such as attn_q=16",
    when=(NOT_FULL, NEW_ADAPTER),
    aliases=("rank",),
)


@dataclass(frozen=True)
class LoraOptions(Options, panel="An adapter"):
    """Options of an adapter, or of training a whole model."""

    ctx: Annotated[int | None, CTX] = None
    full: Annotated[
        bool,
        Option("Train every weight of the model, in float32, instead of an adapter."),
    ] = False
    lora_r: Annotated[int, LORA_R] = RANK
    lora_alpha: Annotated[
        float | None,
        Option(
            "Scale the adapter by alpha / rank; default: 8.",
            unit="ALPHA",
            least=FACTORS[0],
            most=FACTORS[1],
            example="16",
            when=(NOT_FULL, NEW_ADAPTER),
        ),
    ] = None
    target: Annotated[tuple[str, ...], TARGET] = ()
    lora_rank_of: Annotated[tuple[str, ...], LORA_RANK_OF] = ()
    lora_dropout: Annotated[
        float,
        Option(
            "Dropout: the share of its input that an adapter does not see in a step; not for experts.",
            unit="SHARE",
            least=0,
            below=1,
            example="0.05",
            when=(NOT_FULL, NOT_ROUNDED),
        ),
    ] = 0.0
    rslora: Annotated[
        bool, Option("Scale by alpha / sqrt(rank) instead of alpha / rank.", when=(NOT_FULL, NEW_ADAPTER))
    ] = False
    lora_plus_ratio: Annotated[
        float,
        Option(
            "LoRA+: the learning rate of factor B is this many times --lr.",
            unit="RATIO",
            least=FACTORS[0],
            most=FACTORS[1],
            example="16",
            when=(NOT_FULL,),
        ),
    ] = 1.0
    lora_init: Annotated[
        Path | None,
        Option(
            "Start from this adapter and its ranks: a GGUF file, a .bin, a PEFT folder.", when=(NOT_FULL,)
        ),
    ] = None
    only_write_lora: Annotated[
        bool,
        Option(
            "Write the adapter of a checkpoint (--resume), without training.",
            when=(NOT_FULL,),
            resumable=True,
        ),
    ] = False
    adapter_type: Annotated[
        Literal["f32", "f16"],
        Option("Number type in adapter.gguf.", when=(NOT_FULL, NOT_ROUNDED), resumable=True),
    ] = "f32"
    peft: Annotated[
        Path | None,
        Option(
            "Also write the adapter in PEFT's format, into this folder.",
            unit="FOLDER",
            when=(NOT_FULL,),
            resumable=True,
        ),
    ] = None
    base_precision: Annotated[
        Literal["auto", "same", "int8"],
        Option(
            "Number type of products with the base's weights; int8: 8-bit integers, which are faster; "
            "same: that of --precision; auto: int8 if the base is quantized and large, the processor is an x86 without "
            "AMX, and no --precision is given.",
            when=(NOT_FULL, NOT_ROUNDED),
            resumable=True,
            announced=True,
        ),
    ] = "auto"
    cache_base: Annotated[
        Literal["auto", "off", "bf16", "int8"],
        Option(
            "Copy the base's weights to the number type of its products, for speed; auto: if there is memory for it.",
            when=(NOT_FULL, NOT_ROUNDED),
            resumable=True,
            announced=True,
        ),
    ] = "auto"
    rope_freq_base: Annotated[
        float | None,
        Option("RoPE frequency base; default: the model's.", least=1, example="10000"),
    ] = None
    rope_freq_scale: Annotated[
        float | None,
        Option("RoPE frequency scale; default: the model's.", least=1e-6, most=1e6, example="0.5"),
    ] = None
    norm_rms_eps: Annotated[
        float | None,
        Option("Epsilon of the RMS norms; default: the model's.", above=0, below=1, example="1e-5"),
    ] = None

    @property
    def alpha(self) -> float:
        """The alpha of the adapter."""
        return self.lora_alpha if self.lora_alpha is not None else ALPHA

    def scale(self, rank: int) -> float:
        """Return the factor of an adapter's product at a rank."""
        return self.alpha / (math.sqrt(rank) if self.rslora else rank)


def parse_rank(text: str) -> tuple[str, int]:
    """Split WEIGHT=RANK."""
    name, _, number = text.partition("=")
    return name, int(number)


def adapter_ranks(options: LoraOptions, h: "Hyperparameters") -> dict[str, int]:
    """Return the ranks of the weights that get an adapter, in the order of the file."""
    from llamatrain.model.lora_targets import block_matrices, group_weights

    targets = [target for text in options.target for target in text.split(",")]
    chosen = {name for target in targets for name in match_weights("--target", target, h)}
    given_ranks = dict[str, int]()
    for text in options.lora_rank_of:
        target, rank = parse_rank(text)
        for name in match_weights("--lora-rank-of", target, h):
            if targets and name not in chosen:
                raise UsageError(
                    f"--lora-rank-of {shorten(text)}: {name} gets no adapter; add --target {shorten(target)}",
                    code="no-such-target",
                )
            given_ranks[name] = rank
    if not targets:
        chosen = {*block_matrices(h), *given_ranks}
    rows = group_weights("norms", h)
    ranks = {name: RANK_OF_NORMS if name in rows else options.lora_r for name in h.shapes if name in chosen}
    return ranks | given_ranks


def check_dropout(rate: float, names: Iterable[str], h: "Hyperparameters") -> None:
    """Raise if there is dropout, and one of the weights that get an adapter is a stack of experts."""
    experts = next((name for name in names if h.weight_kind(name).role == "experts"), None)
    if rate and experts:
        raise OptionError(
            lambda spelt: (
                f"{spelt('lora_dropout')} {rate:g} does not work with adapters of experts, which have no dropout "
                f"({experts} has one); leave it out, or train no experts"
            ),
            code="dropout-of-experts",
        )


def match_weights(option: str, target: str, h: "Hyperparameters") -> set[str]:
    """Return the weights that an option's value names."""
    from llamatrain.model.lora_targets import match_target

    try:
        return match_target(target, h)
    except UsageError as error:
        raise UsageError(f"{option} {error}", code=error.code) from None
