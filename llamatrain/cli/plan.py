"""`llamatrain plan`: what a run will take, before anything is loaded."""

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from llamatrain.cli import finetune, from_scratch
from llamatrain.cli.given import given_options
from llamatrain.config.options import build, options_of
from llamatrain.config.units import Size
from llamatrain.errors import MemoryPlanError
from llamatrain.recipe.options import PlaceOptions

if TYPE_CHECKING:
    from llamatrain.recipe.memory import Way


def show(choice: "Way", excess: str | None, limited: bool, as_json: bool) -> None:
    if excess and limited:
        raise MemoryPlanError(excess)
    setting = choice.setting
    bytes_ = {**asdict(choice.needs), "total": choice.total}
    how = {"remat": str(choice.policy), "batch": setting.batch, "splits": choice.splits, "precision": setting.precision}
    if as_json:
        print(json.dumps({**bytes_, **how, "threads": setting.threads, "parameters": setting.h.parameters}))
        return
    print(f"{setting.h.describe()}: {setting.h.parameters:,} parameters")
    parts = f" in {choice.splits} parts each" if choice.splits > 1 else ""
    rows = f"batches of {setting.batch * choice.splits} rows{parts}"
    print(f"{setting.precision}, {setting.threads} threads, {rows}, recomputing: {choice.policy}\n")
    for name, size in bytes_.items():
        if size:
            print(f"{name.replace('_', ' '):14} {size:>18,}  {Size(size).words:>8}")
    if excess:
        print(f"warning: {excess}", file=sys.stderr)


@click.group()
def command() -> None:
    """What a run would take of memory: the same options as the run itself, and nothing is read, written or trained."""


@command.command("from-scratch")
@click.argument("data", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: bytes by what they are for, and how it would run.")
@options_of(PlaceOptions, *from_scratch.CLASSES)
@click.pass_context
def plan_from_scratch(context: click.Context, /, data: tuple[str, ...], as_json: bool, **values: Any) -> None:
    """Of `llamatrain from-scratch` with these options. Text is not read: a vocabulary to be learned counts in full."""
    from llamatrain.recipe.prepare import planned

    place = build(PlaceOptions, values)
    data, values, given = given_options(context, data, values, place, *from_scratch.CLASSES)
    options = from_scratch.checked(data, values, given)
    show(*planned(options, place, given), options.train.memory is not None, as_json)


@command.command("finetune")
@click.argument("base", required=False)
@click.argument("data", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: bytes by what they are for, and how it would run.")
@options_of(PlaceOptions, *finetune.CLASSES, defaults=finetune.DEFAULTS)
@click.pass_context
def plan_finetune(context: click.Context, /, base: str | None, data: tuple[str, ...], as_json: bool, **values: Any) -> None:
    """Of `llamatrain finetune` with these options. Of the base only its head is read."""
    from llamatrain.recipe.prepare import planned

    place = build(PlaceOptions, values)
    data, values, given = given_options(context, data, values, place, *finetune.CLASSES)
    options, place = finetune.named(base, data, values, given, place)
    show(*planned(options, place, given), options.train.memory is not None, as_json)
