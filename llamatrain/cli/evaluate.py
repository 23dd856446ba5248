"""`llamatrain evaluate`: how well a model predicts some data."""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from llamatrain.adapters.options import AdapterOptions
from llamatrain.cli.typer_app import MultiProcessCommand, make_app, parse_path, with_options
from llamatrain.commands.evaluate import EvaluateOptions, evaluate_model
from llamatrain.config.common import JSON
from llamatrain.config.options import Options, build
from llamatrain.contrastive.options import ContrastiveOptions
from llamatrain.data.options import DataOptions
from llamatrain.platform.escape import make_printable
from llamatrain.preference.options import PreferenceOptions
from llamatrain.run.request import check_model

command = make_app()


@dataclass(frozen=True)
class PrintOptions(Options, panel="Evaluation"):
    """Options of the output."""

    json: Annotated[
        bool,
        replace(
            JSON, sentence="Print one JSON object: loss, perplexity, bits_per_byte, tokens, loss_error, ..."
        ),
    ] = False


@command.command(cls=MultiProcessCommand)
@with_options(
    EvaluateOptions, PrintOptions, AdapterOptions, PreferenceOptions, ContrastiveOptions, DataOptions
)
def evaluate(
    model: Annotated[Path, typer.Argument(metavar="MODEL", parser=parse_path)],
    data: Annotated[list[str] | None, typer.Argument(metavar="DATA")] = None,
    **overrides: Any,
) -> None:
    """Loss, perplexity and bits per byte of MODEL, a GGUF file, on DATA.

    DATA are files (text, JSON, CSV, Parquet), folders, globs, or - for standard input. What counts is what
    would be trained: the
    answers of prompts and chats (--train-on all: their prompts, too), and all of a text, a row of --ctx
    tokens at a time. With
    --objective: how far answers that were chosen are above those that were rejected. With --objective contrastive:
    recall, MRR and NDCG of embeddings.
    """
    printing, options = build(PrintOptions, overrides), build(EvaluateOptions, overrides)
    parts = (
        build(AdapterOptions, overrides),
        build(DataOptions, overrides),
        build(PreferenceOptions, overrides),
        build(ContrastiveOptions, overrides),
    )
    data = list(data or ())
    check_model(str(model), data, "evaluate")
    evaluation = evaluate_model(model, data, options, *parts, overrides)
    if printing.json:
        print(json.dumps(evaluation.as_json()))
    else:
        from llamatrain.report.evaluation_rows import format_table

        encoding = (sys.stdout.encoding or "ascii").lower()
        print(make_printable(format_table(evaluation.as_json(), encoding), encoding, keep="\n"))
