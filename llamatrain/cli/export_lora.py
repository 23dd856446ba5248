"""`llamatrain export-lora`: a model and its adapters made one."""

from pathlib import Path
from typing import Annotated, Any

import typer

from llamatrain.adapters.options import LoraOptions
from llamatrain.cli.application import Command, a_path, application, options_of
from llamatrain.config.options import build
from llamatrain.machine.terminal import unread
from llamatrain.recipe.exporting import exported
from llamatrain.recipe.merging import ExportOptions

command = application()


@command.command(cls=Command)
@options_of(ExportOptions, LoraOptions)
def export_lora(base: Annotated[Path, typer.Argument(metavar="BASE", parser=a_path)], **said: Any) -> None:
    """Merge adapters into BASE, a GGUF model, quantised or not: the new file is a model like any other.

    Adapters need not cover the same weights. What none of them touches is copied as it is. With --only-adapter or --peft they
    are written as one adapter, in another form.
    """
    check = exported(base, build(ExportOptions, said), build(LoraOptions, said)).check
    if check:
        told = f"largest difference {check.largest:.3g}\nmean difference    {check.mean:.3g}"
        told += f"\nlogits within      {check.lowest:.3g} to {check.highest:.3g}\ntokens             {check.tokens}"
        try:
            print(told, flush=True)
        except BrokenPipeError:  # the file is there all the same
            unread()
