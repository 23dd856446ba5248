"""`llamatrain extract-lora`: makes an adapter of the difference between two models."""

from pathlib import Path
from typing import Annotated, Any

import typer

from llamatrain.cli.typer_app import Command, make_app, parse_path, with_options
from llamatrain.commands.extract_lora import ExtractOptions
from llamatrain.commands.extract_lora import extract_lora as extract
from llamatrain.config.options import build

command = make_app()


@command.command(cls=Command)
@with_options(ExtractOptions)
def extract_lora(
    base: Annotated[Path, typer.Argument(metavar="BASE", parser=parse_path)],
    tuned: Annotated[Path, typer.Argument(metavar="TUNED", parser=parse_path)],
    **overrides: Any,
) -> None:
    """Make an adapter for BASE of what TUNED, a model made from it, has learned.

    Of each weight's difference, the adapter has the best approximation of rank --lora-r. Both models may be
    quantized; what rounding to other types has changed is a difference too.
    """
    extract(base, tuned, build(ExtractOptions, overrides))
