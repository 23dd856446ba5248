"""How a run is done, the last of three stages: the way of running it that fits the memory that there is."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from llamatrain.config.units import Size
from llamatrain.distributed.comm import get_comm
from llamatrain.errors import MemoryPlanError, UsageError
from llamatrain.io.madvise import find_mapping
from llamatrain.model.distill import Teacher
from llamatrain.model.frozen_weights import bf16_copy_bytes
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.limits import MANY_LAYERS
from llamatrain.planner.extrapolate import PARTS, way_of_many
from llamatrain.planner.limits import allowed
from llamatrain.planner.memory import MemoryDemand, MemoryPlan, batches_of, excess, fixed, growth_of, way_with
from llamatrain.platform.memory import resident_bytes
from llamatrain.platform.terminal import log_if_slow
from llamatrain.run.options import AUTO
from llamatrain.run.resolve import ResolvedConfig
from llamatrain.run.search import MicrobatchSplit, PlanCandidate, PlanSearch, PlanTrial
from llamatrain.run.trainable import Cache, Trainable, TrainableWeights
from llamatrain.train.graphs import StepSpec


@dataclass(frozen=True, kw_only=True)
class FittedRun:
    way: MemoryPlan
    leaves: TrainableWeights
    cache: Cache  # whether the base's matrices are copied
    excess: str | None  # why it does not fit, if so
    tried: Sequence[PlanTrial] = ()  # ways that were planned, this one last
    most: int | None = None  # that it may take


@dataclass(frozen=True, kw_only=True)
class DataShape:
    """Of a run's rows, samples and past, what decides its memory."""

    lengths: Sequence[int]
    sparse: bool  # many tokens are not trained
    validating: bool
    decoding: int  # positions of the cache for samples; 0: none
    goes_on: bool  # then its batches stay as they are
    to_come: int = 0  # bytes that the program will hold beside what it holds now
    teacher: Teacher | None = None
    rough: bool = False  # nothing is to be run: of many layers some may speak for all


def fitted(resolved: ResolvedConfig, target: Trainable, extent: DataShape, refuse: bool = True) -> FittedRun:
    """The usual way, or the fastest that fits the memory. At last one that does not fit: where that is to be refused, without
    planning it if so much is clear."""
    held, most = (
        max(get_comm().all_gather(resident_bytes())) + extent.to_come,
        agreed(resolved.asked.train.memory),
    )
    offers = [
        offer_of(resolved, target, extent, held, cache) for cache in caches_of(resolved, target.h, most)
    ]
    offers = [*(each for each in offers[:-1] if most is None or least_of(each) <= most), offers[-1]]
    if refuse and most is not None and len(offers) == 1:  # at once: planning a model so large takes a while
        check_batches(offers[0], most)
        check_fixed(
            fixed(offers[0].setting, offers[0].demand),
            offers[0].demand.interpreter,
            most,
            offers[0].leaves.copies > 0,
        )
    with log_if_slow(f"planning a run of {target.h.layers:,} layers, which takes a while"):
        search, found, way = way_of(resolved, offers, extent, most)
    told = excess(way, resolved.asked.train.memory, most)
    others = [each for each in search.tried.values() if each is not found]
    return FittedRun(
        way=way,
        leaves=found.offer.leaves,
        cache=found.offer.cache,
        excess=told,
        tried=[*others, found],
        most=most,
    )


def agreed(told: int | None) -> int | None:
    """What each rank may take: as the one has it that may take least."""
    found = [most for most in get_comm().all_gather(allowed(told)) if most is not None]
    return min(found, default=None)


def caches_of(resolved: ResolvedConfig, h: Hyperparameters, most: int | None) -> tuple[Cache, ...]:
    """Whether the base's matrices are copied to bf16, for speed; where that is open: what to try, the first that fits."""
    asked, half = resolved.asked, resolved.precision == "bf16"
    tune = asked.tune
    if not half and tune.cache_base == "bf16":
        raise UsageError("--cache-base bf16 takes --precision bf16")
    if tune.cache_base != "auto" or tune.full or asked.command != "finetune":
        return (tune.cache_base,)
    large = most is not None and 2 * bf16_copy_bytes(h) > most  # half of the memory is left to the run itself
    return ("off",) if large or not half else ("bf16", "off")


def offer_of(
    resolved: ResolvedConfig, target: Trainable, extent: DataShape, held: int, cache: Cache
) -> PlanCandidate:
    """Where the process has `held` so much already."""
    leaves = target.leaves(cache)
    matrices = [array for array in leaves.frozen.values() if array.dtype == np.float32 and array.ndim > 1]
    setting = setting_of(resolved, target.h, leaves, extent)
    demand = MemoryDemand(
        lengths=extent.lengths,
        validating=extent.validating,
        decoding=extent.decoding,
        interpreter=held + growth_of(setting, extent.decoding > 0),
        batches=resolved.asked.train.grad_acc,
        copies=leaves.copies + (extent.teacher.nbytes if extent.teacher else 0),
        pages=max((array.nbytes for array in matrices if find_mapping(array) is not None), default=0),
    )
    return PlanCandidate(cache=cache, leaves=leaves, setting=setting, demand=demand)


def least_of(offer: PlanCandidate) -> int:
    return fixed(offer.setting, offer.demand) + offer.demand.interpreter


def way_of(
    resolved: ResolvedConfig, offers: Sequence[PlanCandidate], extent: DataShape, most: int | None
) -> tuple[PlanSearch, PlanTrial, MemoryPlan]:
    train, last = resolved.asked.train, offers[-1]
    open_ = (
        not extent.goes_on and resolved.asked.preference.data_kind != "answers"
    )  # which are compared within a batch
    search = PlanSearch(remat=train.remat, most=most, parts=open_, planner=way_with)
    if last.setting.h.layers <= MANY_LAYERS or train.remat not in (AUTO, "none", "light", "block"):
        return search, *search.fastest(offers)
    search = replace(search, planner=way_of_many, units=PARTS)
    if most is not None and least_of(last) > most and train.remat == AUTO:  # nothing that is tried fits
        search.plan(MicrobatchSplit(last, 1), "block")
        assert search.leanest
        return search, *search.leanest
    found, way = search.fastest(offers)
    if not extent.rough:
        way = way_with(found.offer.setting, way.policy, found.offer.demand, way.splits)
    return search, found, way


def setting_of(
    resolved: ResolvedConfig, h: Hyperparameters, leaves: TrainableWeights, extent: DataShape
) -> StepSpec:
    train = resolved.asked.train
    return StepSpec(
        h=h,
        weights=leaves.weights,
        trainable=leaves.trained,
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
        lora_plus=resolved.asked.tune.lora_plus_ratio,
        groups=train.grad_groups or 1,
        ranks=resolved.ranks,
        rank=get_comm().rank,
        comm_bf16=resolved.asked.run.grad_comm_dtype == "bf16",
        objective=resolved.asked.preference.built,
        reference=leaves.reference,
    )


def check_batches(offer: PlanCandidate, most: int) -> None:
    """Refuse a step whose batches alone take more than there is."""
    setting, demand = offer.setting, offer.demand
    if (size := batches_of(setting, demand)) > most:
        rows = f"{setting.batch * demand.batches:,} rows of {max(demand.lengths):,} tokens"
        told = (
            f"a step of {rows} takes {Size(size).text} for its tokens alone, and {Size(most).text} are there"
        )
        raise MemoryPlanError(f"{told}; a smaller --batch, --grad-acc or --ctx takes less")


def check_fixed(least: int, held: int, most: int, copied: bool) -> None:
    """What no way of running it can change must fit, beside what the program takes."""
    if least + held <= most:
        return
    parts, less = "weights, gradients and moments", "a smaller model"
    if copied:
        parts, less = f"copies of the base, {parts}", "--cache-base off"
    takes = f"{parts} alone take {Size(least).text}, the program {Size(held).text}"
    raise MemoryPlanError(f"{takes}, and {Size(most).text} are there; {less} takes less")
