"""`llamatrain finetune`: an adapter for a GGUF model, quantised or not; or, with --full, the model itself."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamatrain.adapters.options import LoraOptions
from llamatrain.cli.application import Command, application, options_of
from llamatrain.cli.from_scratch import Data, told
from llamatrain.recipe.asking import given_options
from llamatrain.config.file import BaseArgument
from llamatrain.config.options import build, flag_of
from llamatrain.data.options import DataOptions
from llamatrain.errors import FileError, UsageError
from llamatrain.recipe.options import PlaceOptions, RunOptions, TrainOptions, refuse_idle
from llamatrain.recipe.tuning import OF_ADAPTERS, TuneOptions

if TYPE_CHECKING:
    from llamatrain.recipe.asked import Asked

CLASSES = (TuneOptions, LoraOptions, DataOptions, TrainOptions, RunOptions)
DEFAULTS = {"batch": 4, "lr": 1e-4}


Base = Annotated[str | None, typer.Argument(metavar="BASE")]
command = application()


@command.command(cls=Command)
@options_of(PlaceOptions, *CLASSES, defaults=DEFAULTS)
def finetune(base: Base = None, data: Data = None, **said: Any) -> None:
    """Train a LoRA adapter for BASE, a GGUF model of whatever type, on DATA; with --full, the model itself.

    DATA are files (.txt, .md, .jsonl), folders, globs, or - for standard input. The base stays as it lies in its file. The
    adapter is written as a GGUF file that llama.cpp loads beside the base (--lora).
    """
    from llamatrain.recipe.run import train

    options, place, given = asked(base, data, said)
    told(train(options, place, given))


def asked(base: str | None, data: list[str] | None, said: dict[str, Any]) -> "tuple[Asked, PlaceOptions, set[str]]":
    """What a run is told, where it lives, and the names of the options that were said."""
    place = build(PlaceOptions, said)
    values = given_options(said, place, *CLASSES, BaseArgument)
    named_there = None if place.checkpoint_in else values.get("base")
    if base and named_there and Path(base).exists() and not is_gguf(base):
        data, base = [base, *(data or ())], None
    files = tuple(data or values.get("data", ()))
    options, place = named(base or named_there, files, {**DEFAULTS, **values}, {*values}, place)
    return options, place, {*values}


def named(
    base: str | None, data: tuple[str, ...], values: dict[str, Any], given: set[str], place: PlaceOptions
) -> "tuple[Asked, PlaceOptions]":
    """With a base and data, unless a run goes on that has them. A model as --checkpoint-in is a base that is trained whole."""
    from llamatrain.files.reader import open_gguf

    if place.checkpoint_in and open_gguf(place.checkpoint_in).kind != "checkpoint":
        if base and is_gguf(base):
            raise UsageError(f"--checkpoint-in {place.checkpoint_in} is a model, as {base} is; leave one of them out")
        if lora := sorted(given & {*OF_ADAPTERS}):
            raise UsageError(
                f"--checkpoint-in trains all of a model, and {flag_of(lora[0])} is for an adapter: name the model first"
            )
        base, data = str(place.checkpoint_in), (base, *data) if base else data
        place, values = replace(place, checkpoint_in=None), {**values, "full": True}
    elif base and (place.resume or place.checkpoint_in) and Path(base).exists() and not is_gguf(base):
        data, base = (base, *data), None  # the base need not be named again
    if not place.resume and not place.checkpoint_in:
        if values.get("only_write_lora"):
            raise UsageError("--only-write-lora writes the adapter of a checkpoint: name it with --resume")
        if not base:
            raise UsageError("no model: name a GGUF file, and the data to train on")
        if not data:
            raise UsageError(f"no data to train {base} on: name files (.txt, .md, .jsonl), folders, globs, or -")
    if base is not None and not Path(base).is_file():
        raise FileError(f"{base}: no such file; a GGUF model is needed first, and then the data")
    return checked(base or "", data, values, given), place


def checked(base: str, data: tuple[str, ...], values: dict[str, Any], given: set[str]) -> "Asked":
    """The options of a run, none of which is without effect."""
    from llamatrain.recipe.asked import Asked

    options = Asked(
        files=data,
        data=build(DataOptions, values),
        train=build(TrainOptions, values),
        run=build(RunOptions, values),
        tune=build(TuneOptions, values),
        lora=build(LoraOptions, values),
        command="finetune",
        base=base,
    )
    refuse_idle(options.idle, given)
    if options.train.loss != "cross-entropy":
        raise UsageError("--loss squared-error is for the sine wave only")
    return options


def is_gguf(path: str) -> bool:
    from llamatrain.files.constants import MAGIC

    with suppress(OSError), Path(path).open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC
    return False
