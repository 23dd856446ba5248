"""Chooses the shape, vocabulary and rows per step that learn most in a given time on this machine."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from llamatrain.config.options import OptionError
from llamatrain.distributed.comm import get_comm
from llamatrain.errors import MemoryPlanError, UsageError
from llamatrain.planner.loss_law import bytes_per_token, max_passes, mean_bits, tokens_per_step
from llamatrain.planner.time import forecast_time
from llamatrain.run.prepare import plan_run
from llamatrain.run.request import RunRequest

CTX = 256
SHAPES = (  # width, heads, blocks and vocabulary, from the smallest model
    (64, 2, 2, 1024),
    (64, 2, 3, 2048),
    (96, 3, 3, 2048),
    (128, 4, 4, 2048),
    (160, 5, 4, 2048),
    (192, 6, 5, 2048),
    (256, 8, 5, 4096),
    (320, 5, 6, 4096),
    (384, 6, 7, 4096),
    (512, 8, 8, 8192),
    (640, 10, 10, 8192),
    (768, 12, 12, 8192),
)
LEAST_ROWS, FIRST_ROWS, MOST_ROWS = 4, 16, 128  # of a step
BYTES_PER_ENTRY = 500  # of the vocabulary: a text that has fewer gets a smaller one
LEAST_VOCABULARY = 512
MUCH_WORSE = 1.03  # expected loss relative to the best, beyond which no larger model is tried
ROUNDING = 0.7  # rows are doubled while a step has less than this share of the suitable tokens
SCHEDULE: Mapping[str, Any] = {"schedule": "wsd", "lr_min": 0.0}
RECIPE: Mapping[str, Any] = {"optimizer": "adamuon", "embd_std": 0.02, "weight_decay": 0.3, **SCHEDULE}


@dataclass(frozen=True, kw_only=True)
class ModelChoice:
    """The options of a new model and its steps, and what is expected of it."""

    options: Mapping[str, Any]
    width: int
    parameters: int
    weights: int  # of the blocks
    tokens: float  # that are read in the time
    most_tokens: float  # that it can read of this text before it learns it by heart
    bytes_per_token: float
    step_tokens: int
    step_seconds: float
    bits: float  # per byte: the expected loss


def choose_model(request: RunRequest, text_bytes: int, seconds: float) -> ModelChoice:
    """Return the choice that is expected to learn most, of those that fit the given options and the memory."""
    best: ModelChoice | None = None
    rows = FIRST_ROWS
    for shape in candidate_shapes(request, text_bytes):
        if (choice := choose_rows(request, text_bytes, seconds, shape, rows)) is None:
            continue
        rows = choice.options.get("batch", rows)
        if best and choice.bits > MUCH_WORSE * best.bits:
            break  # larger models learn still less
        if not best or choice.bits < best.bits:
            best = choice
    if best is None:
        raise MemoryPlanError(
            "no model for --minutes fits the memory; leave out options of its size, or raise --memory",
            code="out-of-memory",
        )
    return best


def candidate_shapes(request: RunRequest, text_bytes: int) -> Iterator[dict[str, Any]]:
    """Yield the options of each shape that fits those that were given, from the smallest model."""
    given, config = {*request.given}, request.config
    largest = 1 << max(LEAST_VOCABULARY, text_bytes // BYTES_PER_ENTRY).bit_length() - 1
    learns_vocabulary = not (given & {"vocab_size", "vocab_from"} or config.train.teacher)
    yielded = list[dict[str, Any]]()
    for embd, head, layer, vocabulary in SHAPES:
        shape: dict[str, Any] = {} if "size" in given else {"embd": embd, "head": head, "layer": layer}
        shape |= {"vocab_size": str(min(vocabulary, largest))} if learns_vocabulary else {}
        shape = without(shape, given)
        with suppress(OptionError):
            replace(config.model, **shape).validate()
            if shape not in yielded:
                yielded.append(shape)
                yield shape


def choose_rows(
    request: RunRequest, text_bytes: int, seconds: float, shape: Mapping[str, Any], rows: int
) -> ModelChoice | None:
    """Return the choice of a shape with the rows per step that suit its tokens, or None if none fits the memory.

    More rows per step are faster, but leave fewer steps. `rows` are tried first.
    """

    def forecast(rows: int) -> ModelChoice | None:
        options = without({"ctx": CTX, "batch": rows, **shape, **recipe(request)}, request.given)
        return forecast_choice(request.with_options(options), options, text_bytes, seconds)

    choice = forecast(rows)
    if "batch" in request.given:
        return choice
    most = MOST_ROWS
    while choice is None and rows > LEAST_ROWS:
        rows = most = rows // 2
        choice = forecast(rows)
    if choice is None:
        return None
    row_tokens = choice.step_tokens // rows
    suitable = LEAST_ROWS
    while suitable < most and suitable * row_tokens < ROUNDING * tokens_per_step(choice.tokens):
        suitable *= 2
    return choice if suitable == rows else forecast(suitable) or choice


def recipe(request: RunRequest) -> Mapping[str, Any]:
    """Return the options of the optimizer, unless another one was given, and of the schedule."""
    is_other = "optimizer" in request.given and request.config.train.optimizer != RECIPE["optimizer"]
    return SCHEDULE if is_other else RECIPE


def without(options: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Return options without those that the user gave."""
    return {name: value for name, value in options.items() if name not in given}


def forecast_choice(
    request: RunRequest, options: Mapping[str, Any], text_bytes: int, seconds: float
) -> ModelChoice | None:
    """Forecast what a run with these options learns in a time, or return None if it does not fit the memory."""
    try:
        planned = plan_run(request, graphs=False)
    except MemoryPlanError:
        return None
    if planned.fitted.error:
        return None
    plan = planned.fitted.plan
    forecast = get_comm().broadcast(forecast_time(plan, planned.batches, None))
    if isinstance(forecast, str):
        raise UsageError(
            f"--minutes needs the speed of this machine, which is {forecast}; train with it first, or leave it out",
            code="unknown-speed",
        )
    h = plan.spec.h
    weights = h.parameter_count - h.vocab * h.embd * (1 if h.tied else 2)
    most_tokens = max_passes(weights, text_bytes) * text_bytes / bytes_per_token(h.vocab)
    tokens = min(most_tokens, seconds / forecast.step_seconds * forecast.tokens)
    return ModelChoice(
        options=options,
        width=h.embd,
        parameters=h.parameter_count,
        weights=weights,
        tokens=tokens,
        most_tokens=most_tokens,
        bytes_per_token=bytes_per_token(h.vocab),
        step_tokens=forecast.tokens,
        step_seconds=forecast.step_seconds,
        bits=mean_bits(weights, tokens * bytes_per_token(h.vocab), text_bytes),
    )
