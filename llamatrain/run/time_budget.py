"""Fits the run of a new model into a given time: `from-scratch --minutes`.

The speed of this machine says how many tokens each size of a model can read in that time, and a law of the loss
says which size learns most from them. All that is chosen are ordinary options of the run, so that it can be
repeated and resumed like any other.

The learning rate stays the same in the first third of the steps, so these do not depend on how many follow. After
them, the run is resumed with as many steps as there is time for at the speed that they had.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from llamatrain.config.options import OptionError, format_flag, option_specs
from llamatrain.data.find_files import find_data
from llamatrain.distributed.comm import get_comm
from llamatrain.planner.loss_law import LAWS, learning_rate
from llamatrain.report.format import format_duration
from llamatrain.run.choose_model import RECIPE, ModelChoice, choose_model, recipe, without
from llamatrain.run.request import RunRequest
from llamatrain.run.summary import RunResult
from llamatrain.train.config import PAUSED

EXCLUDED = ("iters", "epochs", "max_time")  # they would choose the number of steps, too
OVERHEAD = 0.05  # expected share of the time in which nothing is trained
WARMUP = 10  # one of this many steps
PARTS = 3  # of the expected steps; after each, the model is validated and saved
HELD_OUT = 0.01  # share of the text for validation
CLOCK_TICK = 0.02  # seconds; the least that some clocks can measure
BY_HEART = "the run ends earlier, since it would only learn this text by heart; more text would use the time"


@dataclass(frozen=True, kw_only=True)
class FittedRequest:
    """A request for a run that is expected to end on time."""

    request: RunRequest  # without --minutes
    most_steps: int  # after which it would learn the text by heart
    first_steps: int | None  # after which the number of steps can be corrected; None: it cannot


def fit_request(request: RunRequest, minutes: float) -> FittedRequest:
    """Choose the options of a run that takes some minutes at the expected speed of this machine (collective)."""
    text = text_bytes(request)
    left = (1 - OVERHEAD) * 60 * minutes
    choice = choose_model(request, text, left)
    most_steps = max(1, int(choice.most_tokens / choice.step_tokens))
    steps = get_comm().broadcast(max(1, min(int(left / choice.step_seconds), most_steps)))
    tokens = steps * choice.step_tokens
    chosen = {**choice.options, **options_by_steps(request, steps, learning_rate(choice.width, tokens))}
    notes = (*request.notes, *describe(choice, chosen, tokens, text))
    fitted = replace(request.with_options({**chosen, "minutes": None}), notes=notes)
    one_host = get_comm().local_size == get_comm().size  # others may not see the folder, to resume from it
    return FittedRequest(
        request=fitted,
        most_steps=most_steps,
        first_steps=part_of(steps) if "decay_steps" in chosen and one_host else None,
    )


def fit_time(request: RunRequest) -> RunRequest:
    """Return a request for a run that is expected to end after --minutes; without it, the same (collective)."""
    minutes = request.config.model.minutes
    return request if minutes is None else fit_request(request, minutes).request


def train_in_time(request: RunRequest, train: Callable[[RunRequest], RunResult]) -> RunResult:
    """Train for --minutes: the first third of the expected steps, then as many as there is time for (collective)."""
    if (minutes := request.config.model.minutes) is None:
        return train(request)
    start = time.monotonic()
    fitted = fit_request(request, minutes)
    if fitted.first_steps is None:
        return train(fitted.request)
    train_start = time.monotonic()
    hooks = replace(request.hooks, pause=fitted.first_steps)
    first = train(replace(fitted.request, hooks=hooks))
    if first.stop.reason != PAUSED:
        return first
    end = time.monotonic()
    overhead = end - train_start - first.seconds  # in which nothing was trained
    left = 60 * minutes - (end - start) - overhead
    in_time = int(left * first.steps / max(first.seconds, CLOCK_TICK))
    useful = fitted.most_steps - first.steps
    more = get_comm().broadcast(max(1, min(in_time, useful)))
    notes = [f"{first.steps} steps took {format_duration(first.seconds)}; {more} more follow"]
    if more == useful and BY_HEART not in fitted.request.notes:
        notes.append(BY_HEART)
    last = train(replace(continue_request(request, fitted.request, first, more), notes=(*notes,)))
    return replace(last, notes=(*first.notes, *last.notes))


def continue_request(request: RunRequest, fitted: RunRequest, first: RunResult, more: int) -> RunRequest:
    """Return the request that resumes a run after its first steps, and takes some more."""
    changed = {"iters": first.steps + more, "decay_steps": more}
    resumable = {
        name
        for part in request.config.parts.values()
        for name, spec in option_specs(type(part)).items()
        if spec.resumable
    }
    return replace(
        fitted.with_options(changed),
        folder_options=replace(fitted.folder_options, resume=first.folder, out=None, overwrite=False),
        hooks=replace(request.hooks, continues=True),
        given=({*request.given} & resumable) | {*changed},
        changed=({*request.changed} & resumable) | {*changed},
    )


def text_bytes(request: RunRequest) -> int:
    """Return the size of the text of a run; raise if the run cannot be fitted into a time."""
    config = request.config
    for name in EXCLUDED:
        if name in request.given:
            raise OptionError(
                lambda spelt, name=name: (  # type: ignore[misc]
                    f"{spelt('minutes')} chooses the number of steps, so {spelt(name)} has no effect; "
                    "leave one of them out"
                ),
                code="conflicting-options",
            )
    if config.train.optimizer == "lbfgs":
        raise OptionError(
            lambda spelt: (
                f"{spelt('minutes')} needs steps that take the same time (got {spelt('optimizer')} lbfgs); "
                "leave one of them out"
            ),
            code="conflicting-options",
        )
    if not config.files or "-" in config.files:
        given = "standard input" if config.files else "no data"
        raise OptionError(
            lambda spelt: f"{spelt('minutes')} needs the size of the text (got {given}); name files",
            code="no-data",
        )
    return max(1, sum(file.size for file in find_data(config.files, raw=config.data.raw).sources))


def options_by_steps(request: RunRequest, steps: int, rate: float) -> dict[str, Any]:
    """Return the options that follow from the number of steps, and the rate, without those that were given."""
    options: dict[str, Any] = {
        "iters": steps,
        "warmup": steps // WARMUP,
        "save_every": part_of(steps),
        "eval_every": part_of(steps),
    }
    if request.config.with_values(without(recipe(request), request.given)).train.schedule == "wsd":
        options["decay_steps"] = max(1, steps - part_of(steps))
    if recipe(request) is RECIPE:
        options["lr"] = rate
    if "val" not in request.given and not request.config.data.overlapping_samples:
        options["val_split"] = HELD_OUT
    return without(options, request.given)


def part_of(steps: int) -> int:
    """Return how many steps a part of the run has."""
    return -(-steps // PARTS)


def describe(choice: ModelChoice, chosen: Mapping[str, Any], tokens: int, text: int) -> Iterator[str]:
    """Yield notes about what was chosen and what is expected of it after some tokens."""
    read = tokens * choice.bytes_per_token
    yield "chosen: " + " ".join(f"{format_flag(name)} {value}" for name, value in chosen.items())
    yield (f"a model of {choice.parameters:,} parameters, which reads the text about {read / text:.1f} times")
    if tokens >= choice.most_tokens - choice.step_tokens:
        yield BY_HEART
    bits = [f"{law.bits(choice.weights, read, text):.2f} on a text like {law.kind}" for law in LAWS]
    yield f"expected bits per byte of new text: {', '.join(bits)}"
