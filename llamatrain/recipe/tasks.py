"""The model that a run works on, and its task, by the options."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Literal

from llamatrain.adapters import reading
from llamatrain.adapters.adapter import Adapter, factors_of
from llamatrain.errors import FileError, UsageError
from llamatrain.files.reader import Gguf
from llamatrain.files.values import Value
from llamatrain.machine.units import cores
from llamatrain.model.frozen import copies_of, frozen, with_pairs
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.options import CTX, ModelOptions, as_options
from llamatrain.model.transformer import parameters
from llamatrain.recipe.asked import Options, Start
from llamatrain.recipe.material import Model, model_of, new_model
from llamatrain.recipe.target import Full, LowRank, Task, adapted, adapter_print, fingerprint
from llamatrain.recipe.tuning import TuneOptions, ranks_of
from llamatrain.recipe.ways import allowed, precision_of

TUNED_CTX = 512  # at most, where it is not given
TRAINABLE = ("F32", "F16", "BF16")


def model_for(options: Options, start: Start, given: Collection[str], read: bool = True) -> Model:
    if not start.model:
        return new_model(options.files, options.model, read)
    if options.command == "finetune":
        model = model_of(start.model, ModelOptions(ctx=options.tune.ctx), (), TUNED_CTX)
        h = overridden(model.h, options.tune)
        return replace(model, h=h, metadata=model.metadata if h == model.h else rekeyed(model.metadata, h))
    resumed = start.checkpoint is not None and bool(start.checkpoint.options)
    model = model_of(start.model, options.model, () if resumed else given, CTX)
    return replace(model, metadata=start.checkpoint.metadata) if start.checkpoint else model


def overridden(h: Hyperparameters, options: TuneOptions) -> Hyperparameters:
    """Rope and epsilon, other than in the file."""
    rope = h.rope
    with as_options():
        if options.rope_freq_base is not None:
            rope = replace(rope, base=options.rope_freq_base)
        if options.rope_freq_scale is not None:
            factor = 1 / options.rope_freq_scale
            rope = replace(rope, kind="linear" if factor != 1 else "none", factor=factor)
        return replace(h, rope=rope, rms_eps=h.rms_eps if options.norm_rms_eps is None else options.norm_rms_eps)


def rekeyed(metadata: Mapping[str, Value], h: Hyperparameters) -> dict[str, Value]:
    """A file's keys with the rope and the epsilon of another model."""
    others = {key: value for key, value in metadata.items() if not key.startswith(f"{h.architecture.name}.rope.")}
    return others | {key: value for key, value in h.metadata("").items() if not key.startswith("general.")}


def task_for(options: Options, model: Model, start: Start) -> Task:
    threads = options.run.threads or cores()
    if options.command == "from-scratch" or options.tune.full:
        if options.tune.full and start.model and not start.checkpoint:
            check_trainable(start.model, model.h)
        base = None if start.checkpoint else start.model
        return Full(model.h, model.metadata, model.untrained, options.train.seed, threads, base, parameters(model.h))
    assert start.model
    return low_rank(options, model.h, start.model, start, threads)


def check_trainable(base: Gguf, h: Hyperparameters) -> None:
    for name in h.shapes:
        if (kind := base.tensors[name].type.name) not in TRAINABLE:
            raise UsageError(f"--full: {base.path}: {name} is {kind}; a quantised model takes an adapter only (no --full)")


def low_rank(options: Options, h: Hyperparameters, base: Gguf, start: Start, threads: int) -> LowRank:
    tune = options.tune
    mixed = [reading.read(path, h).scaled(scale) for path, scale in options.lora.scaled]
    first = reading.read(tune.lora_init, h) if tune.lora_init and not start.checkpoint else None
    factors = [factors_of(adapter, h, base.path) for adapter in mixed]
    if first:
        factors_of(first, h, base.path)
    ranks, scales, alpha = numbers_of(tune, h, first, start.checkpoint.extra if start.checkpoint else None, start.path)
    if start.checkpoint and start.checkpoint.extra.get("base") != fingerprint(base):
        raise FileError(f"{base.path}: not the model that the run in {start.path} was for")
    if start.checkpoint and [adapter_print(adapter) for adapter in mixed] != (kept := start.checkpoint.extra.get("mixed")):
        strange = [adapter for adapter in mixed if not isinstance(kept, list) or adapter_print(adapter) not in kept]
        named = f"{strange[0].source}: not an adapter" if strange else f"{start.path}: not all of the adapters, in their order,"
        told = " ".join(f"--lora-scaled {path} {scale:g}" for path, scale in options.lora.scaled)
        raise FileError(f"{named} that the run began with; received {told or 'none'}")
    all_copied, half = tune.cache_base == "bf16", precision_of(options.train) == "bf16"
    weights, arrays = frozen(base, h, threads, all_copied, half)
    copied = [leaf for name, leaf in weights.tensors.items() if name not in arrays]
    weights, more = with_pairs(weights, factors)
    arrays |= more
    weights, trained = adapted(weights, h, ranks, scales, tune.lora_dropout)
    return LowRank(
        h, base, tune, ranks, scales, alpha, options.train.seed, weights, trained, arrays, not all_copied, copied, threads, first,
        mixed,
    )  # fmt: skip


def numbers_of(
    tune: TuneOptions, h: Hyperparameters, first: Adapter | None, kept: Mapping[str, Any] | None, path: object
) -> tuple[dict[str, int], dict[str, float], float]:
    """Ranks, scales and alpha: of the checkpoint, of the adapter that is gone on from, or by the options."""
    if kept is not None:
        return kept_numbers(kept, h, path)
    if first:
        names = [name for name in h.shapes if name in first.pairs]
        ranks = {name: first.pairs[name].rank for name in names}
        return ranks, {name: first.pairs[name].scale for name in names}, float(first.alpha or tune.lora_r)
    ranks = ranks_of(tune, h)
    return ranks, {name: tune.scale(rank) for name, rank in ranks.items()}, tune.alpha


def kept_numbers(kept: Mapping[str, Any], h: Hyperparameters, path: object) -> tuple[dict[str, int], dict[str, float], float]:
    match kept.get("ranks"), kept.get("scales"), kept.get("alpha"):
        case dict() as ranks, dict() as scales, (int() | float()) as alpha if ranks.keys() == scales.keys():
            pass
        case _:
            raise FileError(f"{path}: what it says of its adapter is damaged")
    if not all(name in h.shapes and isinstance(rank, int) for name, rank in ranks.items()):
        raise FileError(f"{path}: its adapter is for another base")
    return ranks, {name: float(scale) for name, scale in scales.items()}, float(alpha)


def caches(options: Options, h: Hyperparameters) -> tuple[Literal["auto", "bf16", "off"], ...]:
    """Whether the base's matrices are copied to bf16, for speed; where that is open: what to try, the first that fits."""
    tune = options.tune
    if precision_of(options.train) != "bf16" and tune.cache_base == "bf16":
        raise UsageError("--cache-base bf16 takes --precision bf16")
    if tune.cache_base != "auto" or tune.full or options.command != "finetune":
        return (tune.cache_base,)
    most = allowed(options.train)
    large = most is not None and 2 * copies_of(h) > most  # half of the memory is left to the run itself
    return ("off",) if large or precision_of(options.train) != "bf16" else ("bf16", "off")
