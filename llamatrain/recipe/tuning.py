"""The options of `finetune`, and which weights an adapter is for."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from llamatrain.adapters.options import LARGEST
from llamatrain.config.options import flag_of
from llamatrain.errors import UsageError

if TYPE_CHECKING:
    from llamatrain.model.hyperparameters import Hyperparameters

RANK = 8
FACTORS = 1e-9, LARGEST  # what alpha and rates may be: the scales of an adapter that is written must be such as are read


@dataclass(frozen=True)
class TuneOptions:
    ctx: Annotated[int | None, "Tokens in a row; else what the model was made for, but no more than 512."] = None
    full: Annotated[bool, "Train every weight of an F32, F16 or BF16 model, instead of an adapter."] = False
    lora_r: Annotated[int, "Rank of the adapter."] = RANK
    lora_alpha: Annotated[float | None, "What is added is scaled by alpha / rank; else alpha is --lora-r."] = None
    target: Annotated[
        tuple[str, ...], "Weights that get an adapter: attn_q, blk.0-3.ffn_down, output, token_embd; else all linear ones."
    ] = ()
    rank: Annotated[tuple[str, ...], "A rank of its own for a weight, such as attn_q=16 or blk.0.ffn_up=4; may be repeated."] = ()
    lora_dropout: Annotated[float, "The share of its input that an adapter does not see in a step."] = 0.0
    rslora: Annotated[bool, "Scale by alpha / sqrt(rank) instead of alpha / rank."] = False
    lora_plus_ratio: Annotated[float, "The learning rate of an adapter's second factor is this many times --lr."] = 1.0
    lora_init: Annotated[Path | None, "Go on from this adapter, with its ranks: a GGUF file, a .bin, a PEFT folder."] = None
    only_write_lora: Annotated[bool, "Write the adapter of a checkpoint (--resume) and train nothing."] = False
    adapter_type: Annotated[Literal["f32", "f16"], "Number type in adapter.gguf."] = "f32"
    peft: Annotated[Path | None, "Write the adapter for Hugging Face's PEFT, too, into this folder."] = None
    cache_base: Annotated[
        Literal["auto", "off", "bf16"], "A copy of the base's weights in bf16, for speed; auto: where the memory is there."
    ] = "auto"
    rope_freq_base: Annotated[float | None, "Frequency base of the rotary positions, other than the model's."] = None
    rope_freq_scale: Annotated[float | None, "Positions count this much, other than in the model."] = None
    norm_rms_eps: Annotated[float | None, "Epsilon of the RMS norms, other than the model's."] = None

    def __post_init__(self) -> None:
        if self.ctx is not None and not 1 <= self.ctx <= 1 << 20:
            raise UsageError(f"--ctx {self.ctx} cannot be; it takes 1 to {1 << 20}")
        if not 1 <= self.lora_r <= 1 << 16:
            raise UsageError(f"--lora-r {self.lora_r} cannot be; it takes 1 to {1 << 16}")
        for name in ("lora_alpha", "lora_plus_ratio"):
            value, (least, most) = getattr(self, name), FACTORS
            if value is not None and not least <= value <= most:
                raise UsageError(f"{flag_of(name)} {value:g} cannot be; it takes {least:g} to {most:g}, such as 16")
        if not 0 <= self.lora_dropout < 1:
            raise UsageError(f"--lora-dropout {self.lora_dropout:g} must be at least 0 and less than 1, such as 0.05")
        if self.rope_freq_scale is not None and not 1e-6 <= self.rope_freq_scale <= 1e6:
            raise UsageError(f"--rope-freq-scale {self.rope_freq_scale:g} cannot be; it takes 1e-06 to 1e+06, such as 0.5")
        for text in self.rank:
            rank_of(text)

    @property
    def alpha(self) -> float:
        return self.lora_alpha if self.lora_alpha is not None else float(self.lora_r)

    def scale(self, rank: int) -> float:
        return self.alpha / (math.sqrt(rank) if self.rslora else rank)


# What has no effect beside --full, and beside --lora-init.
OF_ADAPTERS = ("lora_r", "lora_alpha", "target", "rank", "lora_dropout", "rslora", "lora_plus_ratio", "lora_init",
               "only_write_lora", "adapter_type", "peft", "cache_base", "lora", "lora_scaled")  # fmt: skip
OF_INIT = ("lora_r", "lora_alpha", "target", "rank", "rslora")


def idle(options: TuneOptions) -> dict[str, str]:
    """The options that have no effect beside the others, and beside which."""
    found = dict.fromkeys(OF_ADAPTERS, "to --full") if options.full else {}
    if options.lora_init:
        found |= dict.fromkeys(OF_INIT, "to --lora-init")
    return found


def rank_of(text: str) -> tuple[str, int]:
    name, _, number = text.partition("=")
    if not name or not number.isdecimal() or len(number) > 5 or not 1 <= int(number) <= 1 << 16:
        raise UsageError(f"--rank {text[:40]!r}: it takes a weight and a rank, such as attn_q=16")
    return name, int(number)


def ranks_of(options: TuneOptions, h: "Hyperparameters") -> dict[str, int]:
    """The weights that get an adapter, in the file's order, and their ranks."""
    from llamatrain.model.targets import linear

    targets = [target for text in options.target for target in text.split(",")]
    chosen = {name for target in targets for name in named("--target", target, h)} if targets else linear(h)
    ranks = {name: options.lora_r for name in h.shapes if name in chosen}
    for text in options.rank:
        target, rank = rank_of(text)
        for name in named("--rank", target, h):
            if name not in ranks:
                raise UsageError(f"--rank {text}: {name} gets no adapter; --target {target} gives it one")
            ranks[name] = rank
    return ranks


def named(option: str, target: str, h: "Hyperparameters") -> set[str]:
    """The weights that an option means."""
    from llamatrain.model.targets import matching

    try:
        return matching(target, h)
    except UsageError as error:
        raise UsageError(f"{option} {error}") from None
