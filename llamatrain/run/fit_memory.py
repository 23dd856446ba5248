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
from llamatrain.planner.extrapolate import PARTS, extrapolate_plan
from llamatrain.planner.limits import memory_limit
from llamatrain.planner.memory import (
    MemoryDemand,
    MemoryPlan,
    batch_bytes,
    fixed_bytes,
    memory_error,
    plan_memory,
    process_growth,
)
from llamatrain.platform.memory import resident_bytes
from llamatrain.platform.terminal import log_if_slow
from llamatrain.run.options import AUTO
from llamatrain.run.resolve import ResolvedConfig
from llamatrain.run.search import MicrobatchSplit, PlanCandidate, PlanSearch, PlanTrial
from llamatrain.run.trainable import Cache, Trainable, TrainableWeights
from llamatrain.train.graphs import StepSpec


@dataclass(frozen=True, kw_only=True)
class FittedRun:
    plan: MemoryPlan
    weights: TrainableWeights
    cache: Cache  # whether the base's matrices are copied
    error: str | None  # why it does not fit, if so
    trials: Sequence[PlanTrial] = ()  # ways that were planned, this one last
    memory_limit: int | None = None  # that it may take


@dataclass(frozen=True, kw_only=True)
class DataShape:
    """Of a run's rows, samples and past, what decides its memory."""

    lengths: Sequence[int]
    sparse: bool  # many tokens are not trained
    has_validation: bool
    decoder_positions: int  # positions of the cache for samples; 0: none
    is_resume: bool  # then its batches stay as they are
    later_bytes: int = 0  # bytes that the program will hold beside what it holds now
    teacher: Teacher | None = None
    may_extrapolate: bool = False  # nothing is to be run: of many layers some may speak for all


def fit_memory(
    resolved: ResolvedConfig, trainable: Trainable, shape: DataShape, refuse: bool = True
) -> FittedRun:
    """The usual way, or the fastest that fits the memory. At last one that does not fit: where that is to be refused, without
    planning it if so much is clear."""
    resident, limit = (
        max(get_comm().all_gather(resident_bytes())) + shape.later_bytes,
        shared_limit(resolved.asked.train.memory),
    )
    candidates = [
        make_candidate(resolved, trainable, shape, resident, cache)
        for cache in cache_choices(resolved, trainable.h, limit)
    ]
    candidates = [
        *(each for each in candidates[:-1] if limit is None or least_bytes(each) <= limit),
        candidates[-1],
    ]
    if (
        refuse and limit is not None and len(candidates) == 1
    ):  # at once: planning a model so large takes a while
        check_batches(candidates[0], limit)
        check_fixed(
            fixed_bytes(candidates[0].spec, candidates[0].demand),
            candidates[0].demand.resident,
            limit,
            candidates[0].weights.copy_bytes > 0,
        )
    with log_if_slow(f"planning a run of {trainable.h.layers:,} layers, which takes a while"):
        search, trial, way = way_of(resolved, candidates, shape, limit)
    error = memory_error(way, resolved.asked.train.memory, limit)
    others = [each for each in search.tried.values() if each is not trial]
    return FittedRun(
        plan=way,
        weights=trial.candidate.weights,
        cache=trial.candidate.cache,
        error=error,
        trials=[*others, trial],
        memory_limit=limit,
    )


def shared_limit(option: int | None) -> int | None:
    """What each rank may take: as the one has it that may take least."""
    limits = [limit for limit in get_comm().all_gather(memory_limit(option)) if limit is not None]
    return min(limits, default=None)


def cache_choices(resolved: ResolvedConfig, h: Hyperparameters, limit: int | None) -> tuple[Cache, ...]:
    """Whether the base's matrices are copied to bf16, for speed; where that is open: what to try, the first that fits."""
    config, is_bf16 = resolved.asked, resolved.precision == "bf16"
    tune = config.tune
    if not is_bf16 and tune.cache_base == "bf16":
        raise UsageError("--cache-base bf16 takes --precision bf16")
    if tune.cache_base != "auto" or tune.full or config.command != "finetune":
        return (tune.cache_base,)
    is_too_large = (
        limit is not None and 2 * bf16_copy_bytes(h) > limit
    )  # half of the memory is left to the run itself
    return ("off",) if is_too_large or not is_bf16 else ("bf16", "off")


def make_candidate(
    resolved: ResolvedConfig, trainable: Trainable, shape: DataShape, resident: int, cache: Cache
) -> PlanCandidate:
    """Where the process has `held` so much already."""
    weights = trainable.make_weights(cache)
    matrices = [array for array in weights.frozen.values() if array.dtype == np.float32 and array.ndim > 1]
    spec = make_spec(resolved, trainable.h, weights, shape)
    demand = MemoryDemand(
        lengths=shape.lengths,
        has_validation=shape.has_validation,
        decoder_positions=shape.decoder_positions,
        resident=resident + process_growth(spec, shape.decoder_positions > 0),
        batches=resolved.asked.train.grad_acc,
        copy_bytes=weights.copy_bytes + (shape.teacher.nbytes if shape.teacher else 0),
        page_bytes=max((array.nbytes for array in matrices if find_mapping(array) is not None), default=0),
    )
    return PlanCandidate(cache=cache, weights=weights, spec=spec, demand=demand)


def least_bytes(candidate: PlanCandidate) -> int:
    return fixed_bytes(candidate.spec, candidate.demand) + candidate.demand.resident


def way_of(
    resolved: ResolvedConfig, offers: Sequence[PlanCandidate], extent: DataShape, most: int | None
) -> tuple[PlanSearch, PlanTrial, MemoryPlan]:
    train, last = resolved.asked.train, offers[-1]
    open_ = (
        not extent.is_resume and resolved.asked.preference.data_kind != "answers"
    )  # which are compared within a batch
    search = PlanSearch(remat=train.remat, most=most, parts=open_, planner=plan_memory)
    if last.spec.h.layers <= MANY_LAYERS or train.remat not in (AUTO, "none", "light", "block"):
        return search, *search.fastest(offers)
    search = replace(search, planner=extrapolate_plan, units=PARTS)
    if most is not None and least_bytes(last) > most and train.remat == AUTO:  # nothing that is tried fits
        search.plan(MicrobatchSplit(last, 1), "block")
        assert search.leanest
        return search, *search.leanest
    found, way = search.fastest(offers)
    if not extent.may_extrapolate:
        way = plan_memory(found.candidate.spec, way.policy, found.candidate.demand, way.splits)
    return search, found, way


def make_spec(
    resolved: ResolvedConfig, h: Hyperparameters, weights: TrainableWeights, shape: DataShape
) -> StepSpec:
    train = resolved.asked.train
    return StepSpec(
        h=h,
        weights=weights.weights,
        trainable=weights.trainable,
        batch=train.batch,
        positions=max(shape.lengths),
        precision=resolved.precision,
        threads=resolved.threads,
        kernels=train.kernels,
        flash=train.flash,
        squared=train.loss == "squared-error",
        optimizer=resolved.optimizer,
        gradients=resolved.gradients,
        clip=train.clip,
        drop_base=weights.drop_base,
        sparse=shape.sparse,
        teacher=shape.teacher,
        lora_plus=resolved.asked.tune.lora_plus_ratio,
        groups=train.grad_groups or 1,
        ranks=resolved.ranks,
        rank=get_comm().rank,
        comm_bf16=resolved.asked.run.grad_comm_dtype == "bf16",
        objective=resolved.asked.preference.built,
        reference=weights.reference,
    )


def check_batches(offer: PlanCandidate, most: int) -> None:
    """Refuse a step whose batches alone take more than there is."""
    setting, demand = offer.spec, offer.demand
    if (size := batch_bytes(setting, demand)) > most:
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
