"""`llamatrain export-lora`: a model and its adapters made one."""

from pathlib import Path
from typing import Annotated, Any

import typer

from llamatrain.adapters.options import LoraOptions
from llamatrain.cli.application import Command, a_path, application, options_of
from llamatrain.config.options import build
from llamatrain.recipe.interrupts import ended_in_order
from llamatrain.recipe.merging import ExportOptions, merged

command = application()


@command.command(cls=Command)
@options_of(ExportOptions, LoraOptions)
def export_lora(base: Annotated[Path, typer.Argument(metavar="BASE", parser=a_path)], **said: Any) -> None:
    """Merge adapters into BASE, a GGUF model, quantised or not: the new file is a model like any other.

    Adapters need not cover the same weights. What none of them touches is copied as it is.
    """
    with ended_in_order():
        check = merged(base, build(ExportOptions, said), build(LoraOptions, said)).check
    if check:
        print(f"largest difference {check.largest:.3g}\nmean difference    {check.mean:.3g}")
        print(f"logits within      {check.lowest:.3g} to {check.highest:.3g}\ntokens             {check.tokens}")
