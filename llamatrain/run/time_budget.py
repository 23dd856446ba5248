"""Fits the run of a new model into a given time: `from-scratch --minutes`.

The speed of this machine says how many tokens each size of a model can read in that time, and a law of the loss
says which size learns most from them. A few steps of that size are tried before the number of steps is set. All
that is chosen are ordinary options of the run, so that it can be repeated and resumed like any other.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from llamatrain.config.options import OptionError, format_flag
from llamatrain.data.find_files import find_data
from llamatrain.distributed.comm import get_comm
from llamatrain.planner.loss_law import LAWS, learning_rate
from llamatrain.platform.terminal import log_line
from llamatrain.run.choose_model import ModelChoice, choose_model, recipe, without
from llamatrain.run.request import RunRequest
from llamatrain.run.signals import Interrupts
from llamatrain.run.step_trial import try_steps

EXCLUDED = ("iters", "epochs", "max_time")  # they would choose the number of steps, too
OVERHEAD = 0.05  # expected share of the time in which nothing is trained
TRIAL = 0.02  # share of the time in which steps are tried
TRIAL_STEPS = 8  # at least
WARMUP = 10  # one of this many steps
PARTS = 4  # of the run; after each, the model is validated and saved
HELD_OUT = 0.01  # share of the text for validation


def fit_time(request: RunRequest, interrupts: Interrupts | None = None) -> RunRequest:
    """Return a request for a run that ends after --minutes, or the same request without that option (collective).

    With `interrupts`, some steps are tried, and correct the forecast of their time.
    """
    if (minutes := request.config.model.minutes) is None:
        return request
    start, seconds = time.monotonic(), 60 * minutes
    text = text_bytes(request)
    left = (1 - OVERHEAD) * seconds
    choice = choose_model(request, text, left)
    step_seconds = choice.step_seconds
    if interrupts:
        count = max(TRIAL_STEPS, round(TRIAL * seconds / step_seconds))
        log_line(f"trying {count} steps of {choice.step_tokens:,} tokens")
        trial = try_steps(request.with_options(choice.options), count, interrupts)
        step_seconds, left = trial.step_seconds, seconds - (time.monotonic() - start) - trial.prepare_seconds
    most_steps = choice.most_tokens / choice.step_tokens
    steps = get_comm().broadcast(max(1, int(min(left / step_seconds, most_steps))))
    tokens = steps * choice.step_tokens
    chosen = {**choice.options, **options_by_steps(request, steps, tokens)}
    notes = (*request.notes, *describe(choice, chosen, tokens, text))
    return replace(request.with_options({**chosen, "minutes": None}), notes=notes)


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
    if not config.files or "-" in config.files:
        given = "standard input" if config.files else "no data"
        raise OptionError(
            lambda spelt: f"{spelt('minutes')} needs the size of the text (got {given}); name files",
            code="no-data",
        )
    return max(1, sum(file.size for file in find_data(config.files, raw=config.data.raw).sources))


def options_by_steps(request: RunRequest, steps: int, tokens: int) -> dict[str, Any]:
    """Return the options that follow from the number of steps, without those that were given."""
    part = -(-steps // PARTS)
    options: dict[str, Any] = {
        "iters": steps,
        "warmup": steps // WARMUP,
        "save_every": part,
        "eval_every": part,
    }
    if recipe(request):
        options["lr"] = learning_rate(tokens)
    if "val" not in request.given and not request.config.data.overlapping_samples:
        options["val_split"] = HELD_OUT
    return without(options, request.given)


def describe(choice: ModelChoice, chosen: Mapping[str, Any], tokens: int, text: int) -> Iterator[str]:
    """Yield notes about what was chosen and what is expected of it after some tokens."""
    read = tokens * choice.bytes_per_token
    yield "chosen: " + " ".join(f"{format_flag(name)} {value}" for name, value in chosen.items())
    yield (
        f"a model of {choice.parameters / 1e6:.1f} million parameters, which reads the text about "
        f"{read / text:.1f} times"
    )
    if tokens >= choice.most_tokens - choice.step_tokens:
        yield "the run ends earlier, since it would only learn this text by heart; more text would use the time"
    bits = [f"{law.bits(choice.weights, read, text):.2f} on a text like {law.kind}" for law in LAWS]
    yield f"expected bits per byte of new text: {', '.join(bits)}"
