"""Chooses what a run trains, by its options or its checkpoint."""

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from llamatrain.adapters import peft as peft_files
from llamatrain.adapters.options import LARGEST
from llamatrain.distributed.cores import count_cores
from llamatrain.errors import FileError, UsageError
from llamatrain.gguf.reader import Gguf
from llamatrain.model.hyperparameters import Hyperparameters, untrained_tensors
from llamatrain.model.init import init_weights
from llamatrain.model.load import decode_tensor
from llamatrain.model.transformer import OUTPUT_BIAS
from llamatrain.run.config import RunConfig
from llamatrain.run.inputs import RunInputs
from llamatrain.run.lora_options import ALPHA, FACTORS, LoraOptions, adapter_ranks, check_dropout
from llamatrain.run.low_rank import LowRankModel
from llamatrain.run.model import RunModel
from llamatrain.run.resolve import resolve_precision
from llamatrain.run.trainable import FullModel, LoraAdapter, Trainable


def choose_trainable(config: RunConfig, model: RunModel, inputs: RunInputs, peft: Path | None) -> Trainable:
    """Return the model or the adapter that a run trains."""
    threads = config.run.threads or count_cores()
    if config.command == "from-scratch" or config.tune.full:
        check_balance(config, model.h, model.h.shapes)
        model_class = partial(LowRankModel, rank=config.model.lora_r) if config.model.lora_r else FullModel
        return model_class(
            h=model.h,
            metadata=model.metadata,
            untrained=model.extra_tensors
            | (read_untrained(inputs.base, model.h, threads) if inputs.base else new_constants(model.h))
            | read_output(inputs.base, config, model.h, threads),
            seed=config.train.seed,
            threads=threads,
            base=None if inputs.resume_point else inputs.base,
            device=config.train.processor,
            quant_aware=config.train.rounding_type,
            embd_std=config.model.embd_std,
        )
    assert inputs.base
    ranks, scales, alpha = adapter_numbers(config.tune, model.h, inputs)
    check_dropout(config.tune.lora_dropout, ranks, model.h)
    check_balance(config, model.h, ranks)
    if peft:
        peft_files.check_pairs(peft, ranks, model.h)
    return LoraAdapter(
        h=model.h,
        base=inputs.base,
        sources=inputs,
        ranks=ranks,
        scales=scales,
        alpha=alpha,
        dropout=config.tune.lora_dropout,
        seed=config.train.seed,
        threads=threads,
        half=resolve_precision(config.train) == "bf16",
        device=config.train.processor,
        number_type=config.tune.adapter_type,
        peft=peft,
        quant_aware=config.train.rounding_type,
        keeps_base=config.preference.built is not None and config.preference.built.uses_reference,
    )


def check_balance(config: RunConfig, h: Hyperparameters, trained: Collection[str]) -> None:
    """Raise if experts are to be balanced, and no router is trained."""
    routers = [name for name, kind in h.weight_kinds() if kind.role == "router"]
    if not config.train.balance:
        return
    if not routers:
        raise UsageError(
            "--balance has no effect on a model without experts; leave it out", code="unused-option"
        )
    if config.preference.objective:
        raise UsageError("--balance has no effect with --objective; leave it out", code="unused-option")
    if not any(name in trained for name in routers):
        raise UsageError(
            "--balance trains routers, which this adapter leaves as they are; add --target router or --full, "
            "or leave it out",
            code="unused-option",
        )


def new_constants(h: Hyperparameters) -> dict[str, np.ndarray]:
    """Return the weights of a new model that are never trained."""
    kinds = dict(h.weight_kinds())
    arrays = {
        name: np.empty(shape, np.float32)
        for name, shape in h.shapes.items()
        if kinds[name].role == "constant"
    }
    init_weights(h, 0, arrays)
    return arrays


def read_untrained(base: Gguf, h: Hyperparameters, threads: int) -> dict[str, np.ndarray]:
    """Read the tensors of a base that are never trained, but belong to its file."""
    return {name: decode_tensor(base, base.tensors[name], threads) for name in untrained_tensors(base, h)}


def read_output(
    base: Gguf | None, config: RunConfig, h: Hyperparameters, threads: int
) -> dict[str, np.ndarray]:
    """Read the output weight of a base whose embeddings are trained, which need none; nothing for other runs."""
    if base is None or not config.preference.is_contrastive or h.tied:
        return {}
    names = [name for name in (h.output_weight, OUTPUT_BIAS) if name in h.shapes]
    return {name: decode_tensor(base, base.tensors[name], threads) for name in names}


Numbers = tuple[dict[str, int], dict[str, float], float]


def adapter_numbers(tune: LoraOptions, h: Hyperparameters, inputs: RunInputs) -> Numbers:
    """Return ranks, scales and alpha of an adapter.

    They come from the checkpoint, from --lora-init or from the options.
    """
    if inputs.resume_point:
        return read_numbers(inputs.resume_point.checkpoint.extra, h, inputs.resume_point.path)
    if first := inputs.initial_adapter:
        names = [name for name in h.shapes if name in first.pairs]
        ranks = {name: first.pairs[name].rank for name in names}
        return ranks, {name: first.pairs[name].scale for name in names}, float(first.alpha or ALPHA)
    ranks = adapter_ranks(tune, h)
    return ranks, {name: tune.scale(rank) for name, rank in ranks.items()}, tune.alpha


def read_numbers(stored: Mapping[str, Any], h: Hyperparameters, path: Path) -> Numbers:
    """Read ranks, scales and alpha from a checkpoint, and check them."""
    match stored.get("ranks"), stored.get("scales"), stored.get("alpha"):
        case dict() as ranks, dict() as scales, (int() | float()) as alpha if (
            ranks.keys() == scales.keys() and ranks
        ):
            pass
        case _:
            raise FileError(f"{path}: the adapter's numbers are damaged", code="damaged-checkpoint")
    if not all(name in h.shapes and h.weight_kind(name).has_lora for name in ranks):
        raise FileError(f"{path}: the adapter is for another base", code="wrong-checkpoint")
    if not all(type(rank) is int and 1 <= rank <= 1 << 24 for rank in ranks.values()):
        raise FileError(f"{path}: the adapter's ranks are damaged", code="damaged-checkpoint")
    if not are_valid([*scales.values(), alpha]) or 0 < abs(alpha) < FACTORS[0]:
        raise FileError(f"{path}: the adapter's scales are damaged", code="damaged-checkpoint")
    return ranks, {name: float(scale) for name, scale in scales.items()}, float(alpha)


def are_valid(numbers: Collection[Any]) -> bool:
    """Return True if all values are numbers of a sensible size."""
    return all(isinstance(number, int | float) and abs(number) <= LARGEST for number in numbers)
