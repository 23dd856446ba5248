"""The options of `finetune`, and which weights an adapter is for."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from llamatrain.adapters.options import LARGEST
from llamatrain.config.common import CTX
from llamatrain.config.messages import cut
from llamatrain.config.options import Option, Options
from llamatrain.errors import UsageError

if TYPE_CHECKING:
    from llamatrain.model.hyperparameters import Hyperparameters

RANK, HIGHEST = 8, 1 << 16
RANK_OF_NORMS = 1  # as much as a row can have
FACTORS = (
    1e-9,
    LARGEST,
)  # what alpha and rates may be: the scales of an adapter that is written must be such as are read


def is_rank(text: str) -> bool:
    """Of a weight, with its name."""
    name, _, number = text.partition("=")
    return bool(name) and number.isdecimal() and len(number) < 6 and 1 <= int(number) <= HIGHEST


@dataclass(frozen=True)
class LoraOptions(Options, panel="An adapter"):
    ctx: Annotated[int | None, CTX] = None
    full: Annotated[bool, Option("Train every weight of the model, in float32, instead of an adapter.")] = (
        False
    )
    lora_r: Annotated[int, Option("Rank of the adapter.", unit="RANK", least=1, most=HIGHEST)] = RANK
    lora_alpha: Annotated[
        float | None,
        Option(
            "What is added is scaled by alpha / rank; else alpha is --lora-r.",
            unit="ALPHA",
            least=FACTORS[0],
            most=FACTORS[1],
            example="16",
        ),
    ] = None
    target: Annotated[
        tuple[str, ...],
        Option(
            "Weights that get an adapter: attn_q, blk.0-3.ffn_down, blk.8-, output, token_embd, norms; else all linear ones.",
            unit="WEIGHTS",
        ),
    ] = ()
    rank: Annotated[
        tuple[str, ...],
        Option(
            "A rank of its own for a weight, such as attn_q=16 or blk.0.ffn_up=4; may be repeated. Norms have 1.",
            unit="WEIGHT=RANK",
            accepts=is_rank,
            takes="a weight and a rank, such as attn_q=16",
        ),
    ] = ()
    lora_dropout: Annotated[
        float,
        Option(
            "The share of its input that an adapter does not see in a step.",
            unit="SHARE",
            least=0,
            below=1,
            example="0.05",
        ),
    ] = 0.0
    rslora: Annotated[bool, Option("Scale by alpha / sqrt(rank) instead of alpha / rank.")] = False
    lora_plus_ratio: Annotated[
        float,
        Option(
            "The learning rate of an adapter's second factor is this many times --lr.",
            unit="RATIO",
            least=FACTORS[0],
            most=FACTORS[1],
            example="16",
        ),
    ] = 1.0
    lora_init: Annotated[
        Path | None, Option("Go on from this adapter, with its ranks: a GGUF file, a .bin, a PEFT folder.")
    ] = None
    only_write_lora: Annotated[
        bool, Option("Write the adapter of a checkpoint (--resume) and train nothing.")
    ] = False
    adapter_type: Annotated[Literal["f32", "f16"], Option("Number type in adapter.gguf.")] = "f32"
    peft: Annotated[
        Path | None,
        Option("Write the adapter for Hugging Face's PEFT, too, into this folder.", unit="FOLDER"),
    ] = None
    cache_base: Annotated[
        Literal["auto", "off", "bf16"],
        Option("A copy of the base's weights in bf16, for speed; auto: where the memory is there."),
    ] = "auto"
    rope_freq_base: Annotated[
        float | None,
        Option("Frequency base of the rotary positions, other than the model's.", least=1, example="10000"),
    ] = None
    rope_freq_scale: Annotated[
        float | None,
        Option("Positions count this much, other than in the model.", least=1e-6, most=1e6, example="0.5"),
    ] = None
    norm_rms_eps: Annotated[
        float | None,
        Option("Epsilon of the RMS norms, other than the model's.", above=0, below=1, example="1e-5"),
    ] = None

    @property
    def alpha(self) -> float:
        return self.lora_alpha if self.lora_alpha is not None else float(self.lora_r)

    def scale(self, rank: int) -> float:
        return self.alpha / (math.sqrt(rank) if self.rslora else rank)


# What has no effect beside --full, and beside --lora-init.
OF_ADAPTERS = (
    "lora_r",
    "lora_alpha",
    "target",
    "rank",
    "lora_dropout",
    "rslora",
    "lora_plus_ratio",
    "lora_init",
    "only_write_lora",
    "adapter_type",
    "peft",
    "cache_base",
    "lora",
    "lora_scaled",
)
OF_INIT = ("lora_r", "lora_alpha", "target", "rank", "rslora")


def idle(options: LoraOptions) -> dict[str, str]:
    """The options that have no effect beside the others, and beside which."""
    found = dict.fromkeys(OF_ADAPTERS, "to --full") if options.full else {}
    if options.lora_init:
        found |= dict.fromkeys(OF_INIT, "to --lora-init")
    return found


def rank_of(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    return name, int(number)


def ranks_of(options: LoraOptions, h: "Hyperparameters") -> dict[str, int]:
    """The weights that get an adapter, in the file's order, and their ranks."""
    from llamatrain.model.lora_targets import linear, norms

    targets = [target for text in options.target for target in text.split(",")]
    chosen = {name for target in targets for name in named("--target", target, h)}
    own = dict[str, int]()
    for text in options.rank:
        target, rank = rank_of(text)
        for name in named("--rank", target, h):
            if targets and name not in chosen:
                raise UsageError(
                    f"--rank {cut(text)}: {name} gets no adapter; --target {cut(target)} gives it one"
                )
            own[name] = rank
    if not targets:
        chosen = {*linear(h), *own}
    rows = norms(h)
    usual = {name: RANK_OF_NORMS if name in rows else options.lora_r for name in h.shapes if name in chosen}
    return usual | own


def named(option: str, target: str, h: "Hyperparameters") -> set[str]:
    """The weights that an option means."""
    from llamatrain.model.lora_targets import matching

    try:
        return matching(target, h)
    except UsageError as error:
        raise UsageError(f"{option} {error}") from None
