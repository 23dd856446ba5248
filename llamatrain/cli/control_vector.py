"""`llamatrain control-vector`: makes a control vector of pairs of texts."""

from pathlib import Path
from typing import Annotated, Any

import typer

from llamatrain.cli.typer_app import Command, make_app, parse_path, with_options
from llamatrain.commands.control_vector import ControlVectorOptions, make_control_vector
from llamatrain.config.options import build

command = make_app()


@command.command(cls=Command)
@with_options(ControlVectorOptions)
def control_vector(
    model: Annotated[Path, typer.Argument(metavar="MODEL", parser=parse_path)],
    positive: Annotated[Path, typer.Argument(metavar="POSITIVE", parser=parse_path)],
    negative: Annotated[Path, typer.Argument(metavar="NEGATIVE", parser=parse_path)],
    **overrides: Any,
) -> None:
    """Make a control vector that leads MODEL from the texts of NEGATIVE to those of POSITIVE.

    Both are text files with one text in each line; lines of the same number are a pair. The result is a GGUF
    file that generate --control-vector and llama.cpp take.
    """
    make_control_vector(model, positive, negative, build(ControlVectorOptions, overrides))
