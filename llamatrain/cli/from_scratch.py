"""`llamatrain from-scratch`: a new model from text, or from the built-in sine wave."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamatrain.cli.application import Command, application, options_of
from llamatrain.recipe.asking import given_options
from llamatrain.config.file import DataArgument
from llamatrain.config.options import build, declared, flag_of
from llamatrain.data.options import DataOptions
from llamatrain.errors import UsageError
from llamatrain.model.options import ModelOptions
from llamatrain.recipe.demo import SINE
from llamatrain.recipe.options import PlaceOptions, RunOptions, TrainOptions, refuse_idle
from llamatrain.machine.printable import printable

if TYPE_CHECKING:
    from llamatrain.recipe.asked import Asked
    from llamatrain.recipe.run import Finished

CLASSES = (ModelOptions, DataOptions, TrainOptions, RunOptions)
Data = Annotated[list[str] | None, typer.Argument(metavar="DATA")]
command = application()


@command.command(cls=Command)
@options_of(PlaceOptions, *CLASSES)
def from_scratch(data: Data = None, **said: Any) -> None:
    """Train a new llama on DATA; without any, on the built-in sine wave.

    DATA are files (.txt, .md, .jsonl), folders, globs, or - for standard input. The model is written as a GGUF file that
    llama.cpp runs, into the folder of the run, beside checkpoints, options and figures.
    """
    from llamatrain.recipe.run import train

    place = build(PlaceOptions, said)
    options, given = asked(data, said, place)
    told(train(options, place, given))


def asked(data: list[str] | None, said: dict[str, Any], place: PlaceOptions) -> "tuple[Asked, set[str]]":
    """The options of a run, none of which is without effect, and the names of those that were said."""
    from llamatrain.recipe.asked import Asked

    values = given_options(said, place, *CLASSES, DataArgument)
    given, files = {*values}, tuple(data or values.get("data", ()))
    if not (files or place.resume or place.checkpoint_in):
        values = of_the_sine_wave(values)
    parts = {"model": ModelOptions, "data": DataOptions, "train": TrainOptions, "run": RunOptions}
    options = Asked(files=files, **{name: build(cls, values) for name, cls in parts.items()})
    refuse_idle(options.idle, given)
    if files and options.train.loss == "squared-error":
        raise UsageError("--loss squared-error is for the sine wave only; leave the data out, or the option")
    return options, given


def of_the_sine_wave(values: dict[str, Any]) -> dict[str, Any]:
    """With its own defaults."""
    for name in declared(DataOptions):
        if name in values:
            raise UsageError(f"{flag_of(name)} means nothing to the built-in sine wave; name the data, or leave it out")
    sized = ("embd", "head", "layer") if "size" in values else ()
    return {**{name: value for name, value in SINE.items() if name not in sized}, **values}


def told(finished: "Finished") -> None:
    """How a run ended, and what is left to do; a signal's exit code is its own."""
    outcome = finished.outcome
    if outcome.finished:
        ended = "" if outcome.reason == "done" else f"stopped: {outcome.reason}\n"
        line = f"{ended}the {finished.result.stem}: {finished.result}"
    else:
        line = f"{outcome.reason}; to go on: {finished.command}"
    print(printable(line, sys.stderr.encoding, keep="\n"), file=sys.stderr)
    if outcome.signal:
        raise typer.Exit(128 + outcome.signal)
