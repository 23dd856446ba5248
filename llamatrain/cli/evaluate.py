"""`llamatrain evaluate`: how well a model foretells some data."""

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from llamatrain.adapters.options import AdapterOptions
from llamatrain.cli.typer_app import MultiProcessCommand, a_path, application, options_of
from llamatrain.commands.evaluate import EvaluateOptions, evaluated
from llamatrain.config.common import JSON
from llamatrain.config.options import Options, build
from llamatrain.data.options import DataOptions
from llamatrain.preference.options import PreferenceOptions
from llamatrain.run.request import check_model

OF_COMPARED, OF_TEXT = (
    ("margin", "reward_chosen", "reward_rejected", "answers"),
    ("perplexity", "bits_per_byte"),
)
command = application()


@dataclass(frozen=True)
class PrintOptions(Options, panel="Evaluation"):
    json: Annotated[
        bool,
        replace(
            JSON, sentence="Print one JSON object: loss, perplexity, bits_per_byte, tokens, loss_error, ..."
        ),
    ] = False


@command.command(cls=MultiProcessCommand)
@options_of(EvaluateOptions, PrintOptions, AdapterOptions, PreferenceOptions, DataOptions)
def evaluate(
    model: Annotated[Path, typer.Argument(metavar="MODEL", parser=a_path)],
    data: Annotated[list[str], typer.Argument(metavar="DATA")],
    **said: Any,
) -> None:
    """Loss, perplexity and bits per byte of MODEL, a GGUF file, on DATA.

    DATA are files (text, JSON, CSV, Parquet), folders, globs, or - for standard input. What counts is what would be trained: the
    answers of prompts and chats (--train-on all: their prompts, too), and all of a text, a row of --ctx tokens at a time. With
    --objective: how far answers that were chosen are above those that were rejected.
    """
    printing, options = build(PrintOptions, said), build(EvaluateOptions, said)
    parts = build(AdapterOptions, said), build(DataOptions, said), build(PreferenceOptions, said)
    check_model(str(model), data, "evaluate")
    found = asdict(evaluated(model, data, options, *parts, said))
    unsaid = {"notes", *(OF_COMPARED if found["answers"] is None else OF_TEXT)}
    values = {
        name: value if value is not None and math.isfinite(value) else None
        for name, value in found.items()
        if name not in unsaid
    }
    if printing.json:
        print(json.dumps(values))
        return
    for name, value in values.items():
        if value is not None:
            print(f"{name.replace('_', ' '):15} {f'{value:,}' if isinstance(value, int) else f'{value:.6g}'}")
