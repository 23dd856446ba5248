"""The model that a run works on, and its task, by the options."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from llamatrain.adapters import adapter as adapters
from llamatrain.adapters import peft, reading
from llamatrain.adapters.adapter import Adapter
from llamatrain.errors import FileError, UsageError
from llamatrain.files.reader import Gguf
from llamatrain.machine.units import cores
from llamatrain.model.frozen import copies_of, frozen, with_pairs
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.llama import parameters
from llamatrain.model.options import CTX, ModelOptions
from llamatrain.train.begin import Options, Start
from llamatrain.train.material import Model, model_of, new_model
from llamatrain.train.task import Full, LowRank, Task, adapted, adapter_print, fingerprint
from llamatrain.train.tuning import TuneOptions, ranks_of
from llamatrain.train.ways import allowed, precision_of

TUNED_CTX = 512  # at most, where it is not given
TRAINABLE = ("F32", "F16", "BF16")


def model_for(options: Options, start: Start, given: Collection[str], read: bool = True) -> Model:
    if not start.model:
        return new_model(options.files, options.model, read)
    if options.command == "finetune":
        model = model_of(start.model, ModelOptions(ctx=options.tune.ctx), (), TUNED_CTX)
        return replace(model, h=overridden(model.h, options.tune))
    resumed = start.checkpoint is not None and bool(start.checkpoint.options)
    model = model_of(start.model, options.model, () if resumed else given, CTX)
    return replace(model, metadata=start.checkpoint.metadata) if start.checkpoint else model


def overridden(h: Hyperparameters, options: TuneOptions) -> Hyperparameters:
    """Rope and epsilon, other than in the file."""
    rope = h.rope
    if options.rope_freq_base is not None:
        rope = replace(rope, base=options.rope_freq_base)
    if options.rope_freq_scale is not None:
        if not 0 < options.rope_freq_scale < float("inf"):
            raise UsageError(f"--rope-freq-scale {options.rope_freq_scale:g} must be more than 0, such as 0.5")
        factor = 1 / options.rope_freq_scale
        rope = replace(rope, kind="linear" if factor != 1 else "none", factor=factor)
    return replace(h, rope=rope, rms_eps=h.rms_eps if options.norm_rms_eps is None else options.norm_rms_eps)


def task_for(options: Options, model: Model, start: Start, read: bool = True) -> Task:
    """`read`: adapters and copies are loaded, and not only counted."""
    threads = options.run.threads or cores()
    if options.command == "from-scratch" or options.tune.full:
        if options.tune.full and start.model and not start.checkpoint:
            check_trainable(start.model, model.h)
        base = None if start.checkpoint else start.model
        return Full(model.h, model.metadata, model.untrained, options.train.seed, threads, base, parameters(model.h))
    assert start.model
    return low_rank(options, model.h, start.model, start, threads, read)


def check_trainable(base: Gguf, h: Hyperparameters) -> None:
    for name in h.shapes:
        if (kind := base.tensors[name].type.name) not in TRAINABLE:
            raise UsageError(f"--full: {base.path}: {name} is {kind}; a quantised model takes an adapter only (no --full)")


def low_rank(options: Options, h: Hyperparameters, base: Gguf, start: Start, threads: int, read: bool) -> LowRank:
    tune, heads = options.tune, (h.heads, h.kv_heads)
    if tune.peft:
        peft.check_place(tune.peft)
    mixed = [reading.read(path, heads).scaled(scale) for path, scale in options.lora.scaled]
    first = reading.read(tune.lora_init, heads) if tune.lora_init and not start.checkpoint else None
    for adapter in [*mixed, *([first] if first else [])]:
        adapters.check(adapter, h.shapes, h.tied, base.path)
        if norms := [name for name in adapter.pairs if len(h.shapes[name]) == 1]:
            raise FileError(f"{adapter.source}: has a pair for the norm {norms[0]}, which training cannot take along")
    ranks, scales, alpha = numbers_of(tune, h, first, start.checkpoint.extra if start.checkpoint else None, start.path)
    if start.checkpoint and start.checkpoint.extra.get("base") != fingerprint(base):
        raise FileError(f"{base.path}: not the model that the run in {start.path} was for")
    if start.checkpoint:
        for adapter, before in zip(mixed, start.checkpoint.extra.get("mixed", []), strict=False):
            if adapter_print(adapter) != before:
                raise FileError(f"{adapter.source}: not the adapter that the run in {start.path} began with")
    copied = copies_base(options, h, base)
    weights, arrays = frozen(base, h, threads, copied, read)
    if mixed:
        weights, more = with_pairs(
            weights, [{name: (pair.a, pair.b, pair.scale) for name, pair in adapter.pairs.items()} for adapter in mixed]
        )
        arrays |= more
    weights, trained = adapted(weights, h, ranks, scales, tune.lora_dropout)
    copies = copies_of(h) if copied else 0
    return LowRank(
        h, base, tune, ranks, scales, alpha, options.train.seed, weights, trained, arrays, not copied, copies, first, mixed
    )


def numbers_of(
    tune: TuneOptions, h: Hyperparameters, first: Adapter | None, kept: Mapping[str, Any] | None, path: object
) -> tuple[dict[str, int], dict[str, float], float]:
    """Ranks, scales and alpha: of the checkpoint, of the adapter that is gone on from, or by the options."""
    if kept is not None:
        scales, alpha, ranks = kept.get("scales"), kept.get("alpha"), kept.get("ranks")
        if not (
            isinstance(scales, dict) and isinstance(ranks, dict) and isinstance(alpha, float) and scales.keys() == ranks.keys()
        ):
            raise FileError(f"{path}: what it says of its adapter is damaged")
        if not all(name in h.shapes and isinstance(rank, int) for name, rank in ranks.items()):
            raise FileError(f"{path}: its adapter is for another base")
        return {name: int(rank) for name, rank in ranks.items()}, {name: float(scale) for name, scale in scales.items()}, alpha
    if first:
        names = [name for name in h.shapes if name in first.pairs]
        ranks = {name: first.pairs[name].rank for name in names}
        return ranks, {name: first.pairs[name].scale for name in names}, first.alpha or float(tune.lora_r)
    ranks = ranks_of(tune, list(h.shapes), h.tied)
    return ranks, {name: tune.scale(rank) for name, rank in ranks.items()}, tune.alpha


def copies_base(options: Options, h: Hyperparameters, base: Gguf) -> bool:
    """Whether the base's matrices are copied to bf16: for speed, where products are in bf16 and the memory is there."""
    tune = options.tune
    if precision_of(options.train) != "bf16":
        if tune.cache_base == "bf16":
            raise UsageError("--cache-base bf16 takes --precision bf16")
        return False
    if tune.cache_base != "auto":
        return tune.cache_base == "bf16"
    most = allowed(options.train)
    return most is None or 2 * copies_of(h) <= most  # half of the memory is left to the run itself
