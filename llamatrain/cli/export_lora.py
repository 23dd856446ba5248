"""`llamatrain export-lora`: merges adapters into a model."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from llamatrain.adapters.options import AdapterOptions
from llamatrain.cli.typer_app import Command, make_app, parse_path, with_options
from llamatrain.commands.export import export
from llamatrain.commands.merge_adapters import ExportOptions
from llamatrain.config.options import build
from llamatrain.platform.terminal import discard_output, wrap_line

command = make_app()


@command.command(cls=Command)
@with_options(ExportOptions, AdapterOptions)
def export_lora(
    base: Annotated[Path, typer.Argument(metavar="BASE", parser=parse_path)], **overrides: Any
) -> None:
    """Merge adapters into BASE, a GGUF model, quantized or not; the result is an ordinary model.

    Adapters need not cover the same weights. Weights without an adapter are copied as they are. --type converts
    matrices to another type, also without adapters: it quantizes a new model. With --only-adapter or --peft,
    adapters are written as one adapter, in another format.
    """
    check = export(base, build(ExportOptions, overrides), build(AdapterOptions, overrides)).check
    if check:
        facts = {
            "largest difference": f"{check.largest:.3g}",
            "mean difference": f"{check.mean:.3g}",
            "logits within": f"{check.lowest:.3g} to {check.highest:.3g}",
            "tokens": check.tokens,
            "same next token": check.agreeing,
            "mean divergence": f"{check.divergence:.3g}",
            "verdict": check.verdict,
        }
        text = "\n".join(wrap_line(f"{name:19}{value}", sys.stdout) for name, value in facts.items())
        try:
            print(text, flush=True)
        except BrokenPipeError:  # the file is there all the same
            discard_output(sys.stdout)
