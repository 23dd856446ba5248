"""`llamatrain imatrix`: measures how much each column of a model's weights matters."""

from pathlib import Path
from typing import Annotated, Any

import typer

from llamatrain.cli.typer_app import MultiProcessCommand, make_app, parse_path, with_options
from llamatrain.commands.imatrix import IMATRIX_OPTIONS, make_imatrix
from llamatrain.run.request import check_model

command = make_app()


@command.command(cls=MultiProcessCommand)
@with_options(*IMATRIX_OPTIONS)
def imatrix(
    model: Annotated[Path, typer.Argument(metavar="MODEL", parser=parse_path)],
    data: Annotated[list[str] | None, typer.Argument(metavar="DATA")] = None,
    **overrides: Any,
) -> None:
    """Measure on DATA how much each column of MODEL's weights matters, for smaller errors in quantized models.

    The result is an importance matrix in llama.cpp's format: the sums of squares of what the columns are multiplied
    with. export-lora --imatrix and llama-quantize take it. DATA are files (text, JSON, CSV, Parquet), folders, globs,
    or - for standard input, and should resemble what the model is used for.
    """
    data = list(data or ())
    check_model(str(model), data, "imatrix")
    make_imatrix(model, data, overrides)
