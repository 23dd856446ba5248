"""`llamatrain merge`: merges whole models."""

from typing import Annotated, Any

import typer

from llamatrain.cli.typer_app import Command, make_app, parse_path, with_options
from llamatrain.commands.merge_models import MergeOptions, merge_models
from llamatrain.config.options import build

command = make_app()


@command.command(cls=Command)
@with_options(MergeOptions)
def merge(models: Annotated[list[str], typer.Argument(metavar="MODEL")], **overrides: Any) -> None:
    """Merge several models into one: GGUF files of one architecture with the same shapes and vocabulary.

    They may be quantized. All other information is taken from --base, or from the first model. Tensors that are
    the same in all models are copied as they are.
    """
    merge_models([*map(parse_path, models)], build(MergeOptions, overrides))
