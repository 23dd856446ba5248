"""How a run is done, the last of three stages: the way of running it that fits the memory that there is."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llamatrain.config.units import Size
from llamatrain.errors import MemoryPlanError, UsageError
from llamatrain.files.pages import map_of
from llamatrain.machine.memory import resident
from llamatrain.machine.terminal import told_if_long
from llamatrain.machine.world import world
from llamatrain.model.frozen import copies_of
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.teacher import Teacher
from llamatrain.model.unfit import DEEP
from llamatrain.recipe.deep import PARTS, way_of_many
from llamatrain.recipe.limits import allowed
from llamatrain.recipe.memory import Demand, Way, choose, excess, fixed, way_with
from llamatrain.recipe.options import AUTO
from llamatrain.recipe.resolved import Resolved
from llamatrain.recipe.target import Cache, Leaves, Target
from llamatrain.train.graphs import Setting

LOADED = 10**7  # bytes that a process grows by beside what is planned: kernels, what threads have, what is imported late


@dataclass(frozen=True, kw_only=True)
class Fitted:
    way: Way
    leaves: Leaves
    cache: Cache  # whether the base's matrices are copied
    excess: str | None  # why it does not fit, if so


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Of a run's rows, samples and past, what decides its memory."""

    lengths: Sequence[int]
    sparse: bool  # many tokens are not trained
    validating: bool
    decoding: int  # positions of the cache for samples; 0: none
    goes_on: bool  # then its batches stay as they are
    to_come: int = 0  # bytes that the program will hold beside what it holds now
    teacher: Teacher | None = None
    rough: bool = False  # nothing is to be run: of many layers some may speak for all


def fitted(resolved: Resolved, target: Target, extent: Extent, refuse: bool = True) -> Fitted:
    """The first way that fits the memory; where it is open, without copies of the base if not with them. At last one that does
    not fit: where that is to be refused, without planning it if so much is clear."""
    held, most = max(world().gathered(resident())) + extent.to_come, agreed(resolved.asked.train.memory)
    caches = caches_of(resolved, target.h, most)
    with told_if_long(f"planning a run of {target.h.layers:,} layers, which takes a while"):
        for cache in caches:
            leaves, last = target.leaves(cache), cache == caches[-1]
            way = way_of(resolved, target.h, leaves, extent, held, most, refuse and last)
            told = excess(way, resolved.asked.train.memory, most)
            if last or told is None:
                break
    return Fitted(way=way, leaves=leaves, cache=cache, excess=told)


def agreed(told: int | None) -> int | None:
    """What each rank may take: as the one has it that may take least."""
    found = [most for most in world().gathered(allowed(told)) if most is not None]
    return min(found, default=None)


def caches_of(resolved: Resolved, h: Hyperparameters, most: int | None) -> tuple[Cache, ...]:
    """Whether the base's matrices are copied to bf16, for speed; where that is open: what to try, the first that fits."""
    asked, half = resolved.asked, resolved.precision == "bf16"
    tune = asked.tune
    if not half and tune.cache_base == "bf16":
        raise UsageError("--cache-base bf16 takes --precision bf16")
    if tune.cache_base != "auto" or tune.full or asked.command != "finetune":
        return (tune.cache_base,)
    large = most is not None and 2 * copies_of(h) > most  # half of the memory is left to the run itself
    return ("off",) if large or not half else ("bf16", "off")


def way_of(
    resolved: Resolved, h: Hyperparameters, leaves: Leaves, extent: Extent, held: int, most: int | None, refuse: bool
) -> Way:
    """In the memory that there is, of which the process has `held` already."""
    train, setting = resolved.asked.train, setting_of(resolved, h, leaves, extent)
    matrices = [array for array in leaves.frozen.values() if array.dtype == np.float32 and array.ndim > 1]
    demand = Demand(
        lengths=extent.lengths,
        validating=extent.validating,
        decoding=extent.decoding,
        interpreter=held + LOADED,
        batches=train.grad_acc,
        copies=leaves.copies + (extent.teacher.nbytes if extent.teacher else 0),
        pages=max((array.nbytes for array in matrices if map_of(array) is not None), default=0),
    )
    least = fixed(setting, demand)
    open_ = not extent.goes_on and resolved.asked.preference.compare != "answers"  # which are compared within a batch
    if refuse and most is not None:  # at once: planning a model so large takes a while
        check_fixed(least, demand.interpreter, most, leaves.copies > 0)
    if setting.h.layers <= DEEP or train.remat == "optimal" or train.remat.isdecimal():
        return choose(setting, train.remat, demand, most, parts=open_)
    if most is not None and least + demand.interpreter > most and train.remat == AUTO:
        return way_of_many(setting, PARTS, demand)  # nothing that is tried fits
    way = choose(setting, train.remat, demand, most, open_, way_of_many, PARTS)
    return way if extent.rough else way_with(setting, way.policy, demand, way.splits)


def setting_of(resolved: Resolved, h: Hyperparameters, leaves: Leaves, extent: Extent) -> Setting:
    train = resolved.asked.train
    return Setting(
        h=h,
        weights=leaves.weights,
        trained=leaves.trained,
        batch=train.batch,
        positions=max(extent.lengths),
        precision=resolved.precision,
        threads=resolved.threads,
        kernels=train.kernels,
        flash=train.flash,
        squared=train.loss == "squared-error",
        optimizer=resolved.optimizer,
        gradients=resolved.gradients,
        clip=train.clip,
        drop_base=leaves.drops,
        sparse=extent.sparse,
        teacher=extent.teacher,
        plus=resolved.asked.tune.lora_plus_ratio,
        groups=train.shards or 1,
        ranks=resolved.ranks,
        rank=world().rank,
        half_wire=resolved.asked.run.wire == "bf16",
        objective=resolved.asked.preference.made,
        reference=leaves.reference,
    )


def check_fixed(least: int, held: int, most: int, copied: bool) -> None:
    """What no way of running it can change must fit, beside what the program takes."""
    if least + held <= most:
        return
    parts, less = "weights, gradients and moments", "a smaller model"
    if copied:
        parts, less = f"copies of the base, {parts}", "--cache-base off"
    takes = f"{parts} alone take {Size(least).words}, the program {Size(held).words}"
    raise MemoryPlanError(f"{takes}, and {Size(most).words} are there; {less} takes less")
