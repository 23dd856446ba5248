"""`llamatrain finetune`: an adapter for a GGUF model, quantised or not; or, with --full, the model itself."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llamatrain.adapters.options import LoraOptions
from llamatrain.cli.from_scratch import told
from llamatrain.cli.given import given_options
from llamatrain.config.options import build, flag_of, options_of
from llamatrain.data.options import DataOptions
from llamatrain.errors import UsageError
from llamatrain.model.options import ModelOptions
from llamatrain.train.options import PlaceOptions, RunOptions, TrainOptions, refuse_idle
from llamatrain.train.tuning import TuneOptions

if TYPE_CHECKING:
    from llamatrain.train.begin import Options

CLASSES = (TuneOptions, LoraOptions, DataOptions, TrainOptions, RunOptions)
DEFAULTS = {"batch": 4, "lr": 1e-4}
OF_ADAPTERS = ("lora_r", "lora_alpha", "target", "rank", "lora_dropout", "rslora", "lora_plus_ratio", "lora_init",
               "only_write_lora", "adapter_type", "peft", "cache_base", "lora", "lora_scaled")  # fmt: skip
OF_INIT = ("lora_r", "lora_alpha", "target", "rank", "rslora")


def checked(base: str, data: tuple[str, ...], values: dict[str, Any], given: set[str]) -> "Options":
    """The options of a run, none of which is without effect."""
    from llamatrain.train.begin import Options

    tune, train, run = build(TuneOptions, values), build(TrainOptions, values), build(RunOptions, values)
    refuse_idle(train, run, given)
    for others, names, why in ((tune.full, OF_ADAPTERS, "--full"), (tune.lora_init, OF_INIT, "--lora-init")):
        for name in names:
            if others and name in given:
                raise UsageError(f"{flag_of(name)} means nothing to {why}; leave it out")
    if train.optimizer == "lbfgs" and "lora_plus_ratio" in given:
        raise UsageError("--lora-plus-ratio means nothing to --optimizer lbfgs; leave it out")
    if train.loss != "cross-entropy":
        raise UsageError("--loss squared-error is for the sine wave only")
    lora = build(LoraOptions, values)
    return Options(data, ModelOptions(), build(DataOptions, values), train, run, tune, lora, "finetune", base)


@click.command()
@click.argument("base", required=False)
@click.argument("data", nargs=-1)
@options_of(PlaceOptions, *CLASSES, defaults=DEFAULTS)
@click.pass_context
def command(context: click.Context, /, base: str | None, data: tuple[str, ...], **values: Any) -> None:
    """Train a LoRA adapter for BASE, a GGUF model of whatever type, on DATA; with --full, the model itself.

    DATA are files (.txt, .md, .jsonl), folders, globs, or - for standard input. The base stays as it lies in its file. The
    adapter is written as a GGUF file that llama.cpp loads beside the base (--lora).
    """
    from llamatrain.train.recipe import train

    place = build(PlaceOptions, values)
    data, values, given = given_options(context, data, values, place, *CLASSES)
    told(context, train(named(base, data, values, given, place), place, given))


def named(base: str | None, data: tuple[str, ...], values: dict[str, Any], given: set[str], place: PlaceOptions) -> "Options":
    """With a base and data, unless a run goes on that has them."""
    if not place.resume and not place.checkpoint_in:
        if values["only_write_lora"]:
            raise UsageError("--only-write-lora writes the adapter of a checkpoint: name it with --resume")
        if base is None:
            raise UsageError("no model: name a GGUF file, and the data to train on")
        if not data:
            raise UsageError(f"no data to train {base} on: name files (.txt, .md, .jsonl), folders, globs, or -")
    if base is not None and not Path(base).exists():
        raise UsageError(f"{base}: no such file; a GGUF model is needed first, and then the data")
    return checked(base or "", data, values, given)
