"""Which target a run has, by its options, or by the checkpoint that it goes on from."""

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from llamatrain.adapters import peft as peft_files
from llamatrain.adapters.options import LARGEST
from llamatrain.distributed.cores import count_cores
from llamatrain.errors import FileError
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.run.config import RunConfig
from llamatrain.run.inputs import RunInputs
from llamatrain.run.lora_options import FACTORS, LoraOptions, ranks_of
from llamatrain.run.low_rank import LowRankModel
from llamatrain.run.model import RunModel
from llamatrain.run.resolve import precision_of
from llamatrain.run.trainable import FullModel, LoraAdapter, Trainable


def target_of(asked: RunConfig, model: RunModel, sources: RunInputs, peft: Path | None) -> Trainable:
    threads = asked.run.threads or count_cores()
    if asked.command == "from-scratch" or asked.tune.full:
        made = partial(LowRankModel, rank=asked.model.lora_r) if asked.model.lora_r else FullModel
        return made(
            h=model.h,
            metadata=model.metadata,
            untrained=model.untrained,
            seed=asked.train.seed,
            threads=threads,
            base=None if sources.resumed else sources.base,
        )
    assert sources.base
    ranks, scales, alpha = numbers_of(asked.tune, model.h, sources)
    if peft:
        peft_files.check_pairs(peft, ranks, model.h)
    return LoraAdapter(
        h=model.h,
        base=sources.base,
        sources=sources,
        ranks=ranks,
        scales=scales,
        alpha=alpha,
        dropout=asked.tune.lora_dropout,
        seed=asked.train.seed,
        threads=threads,
        half=precision_of(asked.train) == "bf16",
        number_type=asked.tune.adapter_type,
        peft=peft,
    )


Numbers = tuple[dict[str, int], dict[str, float], float]


def numbers_of(tune: LoraOptions, h: Hyperparameters, sources: RunInputs) -> Numbers:
    """Ranks, scales and alpha: of the checkpoint, of the adapter that is gone on from, or by the options."""
    if sources.resumed:
        return kept_numbers(sources.resumed.checkpoint.extra, h, sources.resumed.path)
    if first := sources.first:
        names = [name for name in h.shapes if name in first.pairs]
        ranks = {name: first.pairs[name].rank for name in names}
        return ranks, {name: first.pairs[name].scale for name in names}, float(first.alpha or tune.lora_r)
    ranks = ranks_of(tune, h)
    return ranks, {name: tune.scale(rank) for name, rank in ranks.items()}, tune.alpha


def kept_numbers(kept: Mapping[str, Any], h: Hyperparameters, path: Path) -> Numbers:
    match kept.get("ranks"), kept.get("scales"), kept.get("alpha"):
        case dict() as ranks, dict() as scales, (int() | float()) as alpha if (
            ranks.keys() == scales.keys() and ranks
        ):
            pass
        case _:
            raise FileError(f"{path}: what it says of its adapter is damaged")
    if not all(name in h.shapes and h.weight_kind(name).role != "bias" for name in ranks):
        raise FileError(f"{path}: its adapter is for another base")
    if not all(type(rank) is int and 1 <= rank <= 1 << 24 for rank in ranks.values()):
        raise FileError(f"{path}: the ranks of its adapter are damaged")
    if not sound([*scales.values(), alpha]) or 0 < abs(alpha) < FACTORS[0]:
        raise FileError(f"{path}: the scales of its adapter are damaged")
    return ranks, {name: float(scale) for name, scale in scales.items()}, float(alpha)


def sound(numbers: Collection[Any]) -> bool:
    return all(isinstance(each, int | float) and abs(each) <= LARGEST for each in numbers)
