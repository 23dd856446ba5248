"""`llamatrain from-scratch`: a new model from text, or from the built-in sine wave."""

import sys
from typing import TYPE_CHECKING, Any

import click

from llamatrain.cli.given import given_options
from llamatrain.config.options import build, options_of
from llamatrain.data.options import DataOptions
from llamatrain.errors import UsageError
from llamatrain.model.options import ModelOptions
from llamatrain.recipe.options import PlaceOptions, RunOptions, TrainOptions, refuse_idle
from llamatrain.report.printable import printable

if TYPE_CHECKING:
    from llamatrain.recipe.asked import Asked
    from llamatrain.recipe.run import Finished

CLASSES = (ModelOptions, DataOptions, TrainOptions, RunOptions)


def checked(data: tuple[str, ...], values: dict[str, Any], given: set[str]) -> "Asked":
    """The options of a run, none of which is without effect."""
    from llamatrain.recipe.asked import Asked

    options = Asked(
        files=data,
        model=build(ModelOptions, values),
        data=build(DataOptions, values),
        train=build(TrainOptions, values),
        run=build(RunOptions, values),
    )
    refuse_idle(options.idle, given)
    if data and options.train.loss == "squared-error":
        raise UsageError("--loss squared-error is for the sine wave only; leave the data out, or the option")
    return options


@click.command()
@click.argument("data", nargs=-1)
@options_of(PlaceOptions, *CLASSES)
@click.pass_context
def command(context: click.Context, /, data: tuple[str, ...], **values: Any) -> None:
    """Train a new llama on DATA; without any, on the built-in sine wave.

    DATA are files (.txt, .md, .jsonl), folders, globs, or - for standard input. The model is written as a GGUF file that
    llama.cpp runs, into the folder of the run, beside checkpoints, options and figures.
    """
    from llamatrain.recipe.run import train

    place = build(PlaceOptions, values)
    data, values, given = given_options(context, data, values, place, *CLASSES)
    told(context, train(checked(data, values, given), place, given))


def told(context: click.Context, finished: "Finished") -> None:
    """How a run ended, and what is left to do; a signal's exit code is its own."""
    outcome = finished.outcome
    if outcome.finished:
        ended = "" if outcome.reason == "done" else f"stopped: {outcome.reason}\n"
        line = f"{ended}the {finished.result.stem}: {finished.result}"
    else:
        line = f"{outcome.reason}; to go on: {finished.command}"
    print(printable(line, sys.stderr.encoding, keep="\n"), file=sys.stderr)
    if outcome.signal:
        context.exit(128 + outcome.signal)
