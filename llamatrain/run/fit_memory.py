"""Makes a run fit the memory: chooses recomputation, micro-batches and copies of the base."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from llamatrain.config.units import Size
from llamatrain.contrastive.settings import Contrastive
from llamatrain.distributed.comm import get_comm
from llamatrain.errors import MemoryPlanError, UsageError
from llamatrain.io.madvise import find_mapping
from llamatrain.model.distill import Teacher
from llamatrain.model.frozen_weights import bf16_copy_bytes
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.limits import MANY_LAYERS
from llamatrain.planner.layers import extrapolate_plan
from llamatrain.planner.limits import memory_limit
from llamatrain.planner.memory import (
    MemoryDemand,
    MemoryPlan,
    batch_bytes,
    fixed_bytes,
    host_error,
    memory_error,
    plan_memory,
    process_growth,
)
from llamatrain.planner.search import DEEP_LADDER, PlanCandidate, PlanSearch, PlanTrial
from llamatrain.platform.memory import resident_bytes
from llamatrain.platform.terminal import log_if_slow
from llamatrain.run.options import AUTO, TrainOptions
from llamatrain.run.resolve import ResolvedConfig
from llamatrain.run.trainable import Cache, Trainable, TrainableWeights
from llamatrain.train.graphs import StepSpec
from llamatrain.train.int8_copies import int8_copy_bytes


@dataclass(frozen=True, kw_only=True)
class FittedRun:
    """The memory plan of a run, with the weights it is for."""

    plan: MemoryPlan
    weights: TrainableWeights
    cache: Cache  # how the base's matrices are held
    error: str | None  # why the plan does not fit, if so
    trials: Sequence[PlanTrial] = ()  # the plans that were tried; the chosen one is the last
    memory_limit: int | None = None  # bytes


@dataclass(frozen=True, kw_only=True)
class DataShape:
    """Facts about rows, samples and the checkpoint that decide how much memory a run takes."""

    lengths: Sequence[int]
    has_untrained_tokens: bool  # many tokens are not trained
    has_validation: bool
    decoder_positions: int  # positions in the cache for samples; 0: no samples
    decoder_slots: int = 1  # samples that are generated together
    answer_positions: int = 0  # positions in each cache for answers that are generated to train them
    is_resume: bool  # batches must be split as they were
    later_bytes: int = 0  # the process will grow by this before the run starts
    teacher: Teacher | None = None
    contrastive: Contrastive | None = None
    may_extrapolate: bool = False  # nothing will be run, so a deep model need not be planned exactly


def fit_memory(
    resolved: ResolvedConfig, trainable: Trainable, shape: DataShape, refuse: bool = True
) -> FittedRun:
    """Find the fastest plan that fits the memory, or the smallest plan if none fits.

    With `refuse`, raise MemoryPlanError at once if it is clear without a plan that none can fit.
    """
    train = resolved.config.train
    limit = shared_limit(train.memory, train.processor)
    resident = max(get_comm().all_gather(resident_bytes())) + shape.later_bytes
    candidates, weights = list[PlanCandidate](), dict[str, TrainableWeights]()
    caches = cache_choices(resolved, trainable.h, limit)
    for cache in caches:
        weights[cache] = trainable.make_weights(cache)
        candidate = make_candidate(resolved, trainable.h, weights[cache], shape, resident, cache)
        if cache == caches[-1] or limit is None or least_bytes(candidate) <= limit:
            candidates.append(candidate)
    if refuse and limit is not None and len(candidates) == 1:
        check_batches(candidates[0], limit)
        check_fixed(candidates[0], limit, has_copies=weights[caches[-1]].copy_bytes > 0)
    with log_if_slow(f"planning a run of {trainable.h.layers:,} layers, which takes a while"):
        search = make_search(resolved, shape, trainable.h.layers, limit)
        trial, plan = search.run(candidates)
        if search.is_deep and not shape.may_extrapolate:
            plan = plan_memory(trial.candidate.spec, plan.policy, trial.candidate.demand, plan.splits)
    others = [other for other in search.trials.values() if other is not trial]
    return FittedRun(
        plan=plan,
        weights=weights[trial.candidate.cache],
        cache=next(cache for cache in caches if cache == trial.candidate.cache),
        error=memory_error(plan, train.memory, limit) or host_error(plan, memory_limit(None)),
        trials=[*others, trial],
        memory_limit=limit,
    )


def make_search(resolved: ResolvedConfig, shape: DataShape, layers: int, limit: int | None) -> PlanSearch:
    """Return a search over the plans that the options allow."""
    remat = resolved.config.train.remat
    is_deep = layers > MANY_LAYERS and remat in (AUTO, *DEEP_LADDER)
    return PlanSearch(
        policy=None if remat == AUTO else remat,
        limit=limit,
        may_split=not shape.is_resume and not resolved.config.preference.needs_whole_batch,
        planner=extrapolate_plan if is_deep else plan_memory,
        is_deep=is_deep,
    )


def shared_limit(option: int | None, device: str) -> int | None:
    """Return the memory limit of the rank that has least; `option` is the limit that the user gave."""
    limits = [limit for limit in get_comm().all_gather(memory_limit(option, device)) if limit is not None]
    return min(limits, default=None)


def cache_choices(resolved: ResolvedConfig, h: Hyperparameters, limit: int | None) -> tuple[Cache, ...]:
    """Return the ways to hold the base's matrices, the fastest first: as copies, or as they are in the file."""
    tune, is_bf16 = resolved.config.tune, resolved.precision == "bf16"
    is_int8 = resolved.base_precision == "int8"
    if not is_bf16 and tune.cache_base == "bf16":
        raise UsageError("--cache-base bf16 needs --precision bf16", code="conflicting-options")
    if is_int8 and tune.cache_base == "bf16":
        raise UsageError("--cache-base bf16 needs --base-precision same", code="conflicting-options")
    if tune.cache_base == "int8" and not is_int8:
        raise UsageError("--cache-base int8 needs --base-precision int8", code="conflicting-options")
    is_compiled = resolved.config.train.processor == "cpu"
    if tune.cache_base == "int8" and not is_compiled:
        raise UsageError("--cache-base int8 needs --kernels cpu", code="conflicting-options")
    if tune.cache_base != "auto" or tune.full or resolved.config.command != "finetune":
        return (tune.cache_base,)
    if resolved.config.train.quant_aware:
        return ("off",)
    if is_int8:
        copied: tuple[Cache, int] = ("int8", int8_copy_bytes(h))
    else:
        copied = ("bf16", bf16_copy_bytes(h))
    # half of the memory is left to everything else
    is_too_large = limit is not None and 2 * copied[1] > limit
    is_possible = is_compiled if is_int8 else is_bf16
    return (copied[0], "off") if is_possible and not is_too_large else ("off",)


def make_candidate(
    resolved: ResolvedConfig,
    h: Hyperparameters,
    weights: TrainableWeights,
    shape: DataShape,
    resident: int,
    cache: Cache,
) -> PlanCandidate:
    """Describe a step to the planner; `resident` is what the process takes already."""
    spec = make_spec(resolved, h, weights, shape)
    device = spec.device
    demand = MemoryDemand(
        lengths=shape.lengths,
        has_validation=shape.has_validation,
        decoder_positions=shape.decoder_positions,
        decoder_slots=shape.decoder_slots,
        answer_positions=shape.answer_positions,
        resident=resident + process_growth(spec, max(shape.decoder_positions, shape.answer_positions) > 0),
        batches=resolved.config.train.grad_acc,
        copy_bytes=weights.copy_bytes + (shape.teacher.nbytes if shape.teacher else 0),
        page_bytes=base_bytes(weights.frozen.values(), device.is_host),
        own_memory=device.memory_limit() is not None,
    )
    return PlanCandidate(cache=cache, spec=spec, demand=demand)


def base_bytes(arrays: Iterable[np.ndarray], is_host: bool) -> int:
    """Return the bytes of frozen arrays that are resident, besides quantized ones on a host.

    A host reads the float32 weights of a file one at a time; another device has all frozen weights.
    """
    if not is_host:
        return sum(array.nbytes for array in arrays)
    matrices = (array for array in arrays if array.dtype == np.float32 and array.ndim > 1)
    return max((array.nbytes for array in matrices if find_mapping(array) is not None), default=0)


def least_bytes(candidate: PlanCandidate) -> int:
    """Return what every plan of a candidate takes at least."""
    resident = 0 if candidate.demand.own_memory else candidate.demand.resident
    return fixed_bytes(candidate.spec, candidate.demand) + resident


def make_spec(
    resolved: ResolvedConfig, h: Hyperparameters, weights: TrainableWeights, shape: DataShape
) -> StepSpec:
    """Describe the step of a run to the graph builder."""
    train = resolved.config.train
    return StepSpec(
        h=h,
        weights=weights.weights,
        trainable=weights.trainable,
        batch=train.batch,
        rope_length=max(shape.lengths),
        precision=resolved.precision,
        int8=resolved.base_precision == "int8",
        int8_copies=weights.int8_copies,
        rounded=weights.rounded,
        threads=resolved.threads,
        kernels=train.processor,
        flash=train.flash,
        squared=train.loss == "squared-error",
        optimizer=resolved.optimizer,
        gradients=resolved.gradients,
        clip=train.clip,
        drop_base=weights.drop_base,
        reads_ahead=weights.drop_base and is_larger_than_memory(weights.frozen.values(), train),
        has_untrained_tokens=shape.has_untrained_tokens,
        teacher=shape.teacher,
        balance=train.balance,
        lora_plus=resolved.config.tune.lora_plus_ratio,
        groups=train.grad_groups or 1,
        ranks=resolved.ranks,
        rank=get_comm().rank,
        comm_bf16=resolved.config.run.grad_comm_dtype == "bf16",
        objective=resolved.config.preference.built,
        contrastive=shape.contrastive,
        grpo=resolved.config.grpo_settings,
        reference=weights.reference,
    )


def is_larger_than_memory(arrays: Iterable[np.ndarray], train: TrainOptions) -> bool:
    """Return True if the mapped weights of a base may be evicted between two reads.

    They need more than half of the memory limit; the other half is left to everything else.
    """
    limit = memory_limit(train.memory, train.processor)
    size = sum(array.nbytes for array in arrays if find_mapping(array) is not None)
    return limit is not None and 2 * size > limit


def check_batches(candidate: PlanCandidate, limit: int) -> None:
    """Raise if the tokens of a step alone exceed the limit."""
    spec, demand = candidate.spec, candidate.demand
    if (size := batch_bytes(spec, demand)) > limit:
        rows = f"{spec.batch * demand.batches:,} rows of {max(demand.lengths):,} tokens"
        raise MemoryPlanError(
            f"the tokens of a step with {rows} take {Size(size).text}, and the limit is {Size(limit).text}; "
            "reduce --batch, --grad-acc or --ctx",
            code="out-of-memory",
        )


def check_fixed(candidate: PlanCandidate, limit: int, has_copies: bool) -> None:
    """Raise if the parts that every plan needs exceed the limit."""
    if least_bytes(candidate) <= limit:
        return
    size, resident = fixed_bytes(candidate.spec, candidate.demand), candidate.demand.resident
    parts = "weights, gradients and moments"
    parts, advice = (
        (f"copies of the base, {parts}", "use --cache-base off")
        if has_copies
        else (parts, "use a smaller model")
    )
    program = "" if candidate.demand.own_memory else f" and the program {Size(resident).text}"
    raise MemoryPlanError(
        f"{parts} take {Size(size).text}{program}, and the limit is {Size(limit).text}; {advice}",
        code="out-of-memory",
    )
