"""`llamatrain import`: converts a model of transformers to GGUF."""

from pathlib import Path
from typing import Annotated, Any

import typer

from llamatrain.cli.typer_app import Command, make_app, parse_path, with_options
from llamatrain.commands.import_model import ImportOptions
from llamatrain.commands.import_model import import_model as run_import
from llamatrain.config.options import build

command = make_app()


@command.command(cls=Command)
@with_options(ImportOptions)
def import_model(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", parser=parse_path)], **overrides: Any
) -> None:
    """Convert a model of Hugging Face's transformers to a GGUF file.

    FOLDER has config.json, the weights as safetensors, and the tokenizer. Names, types and bytes of the tensors are
    those of llama.cpp's converter. Of a model that also sees or hears, the text part is taken.
    """
    run_import(folder, build(ImportOptions, overrides))
