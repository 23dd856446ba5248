"""`llamatrain finetune`: trains an adapter for a GGUF model or, with --full, the model itself."""

from typing import Annotated, Any

import typer

from llamatrain.cli.from_scratch import Data, run_request
from llamatrain.cli.typer_app import MultiProcessCommand, make_app, with_options
from llamatrain.run.options import RunFolderOptions
from llamatrain.run.request import FINETUNE_DEFAULTS, FINETUNE_OPTIONS, request_finetune

Base = Annotated[str | None, typer.Argument(metavar="BASE")]
command = make_app()


@command.command(cls=MultiProcessCommand)
@with_options(RunFolderOptions, *FINETUNE_OPTIONS, defaults=FINETUNE_DEFAULTS)
def finetune(base: Base = None, data: Data = None, **overrides: Any) -> None:
    """Train a LoRA adapter for BASE, a GGUF model of whatever type, on DATA; with --full, the model itself.

    DATA are files (text, JSON, CSV, Parquet), folders, globs, or - for standard input. The base stays as it
    lies in its file. The adapter is written as a GGUF file that llama.cpp loads with the base (--lora).
    """
    run_request(request_finetune(base, data or (), overrides))
