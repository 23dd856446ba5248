"""`llamatrain preview`: shows rows of data as they will be trained."""

import json
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamatrain.cli.typer_app import Command, make_app, with_options
from llamatrain.commands.preview import (
    PreviewOptions,
    avoid_compiling,
    count_tokens,
    first_rows,
    is_chosen,
    open_rows,
    sample_kinds,
    split_runs,
    split_samples,
)
from llamatrain.config.common import JSON
from llamatrain.config.options import Options, build
from llamatrain.data.options import DataOptions
from llamatrain.platform.escape import make_printable
from llamatrain.platform.terminal import log_line
from llamatrain.preference.options import PreferenceDataOptions

if TYPE_CHECKING:
    import numpy as np
    from rich.text import Text

    from llamatrain.data.batches import Batches
    from llamatrain.data.tokenizer import Tokenizer

MAX_SHOWN = 12  # token numbers of a row that are shown
KEPT_CHARS = "\n\t"  # control characters that are printed
command = make_app()


@dataclass(frozen=True)
class PrintRowsOptions(Options, panel="Rows"):
    """Options of the output."""

    json: Annotated[
        bool,
        replace(JSON, sentence="Print one JSON object a row: tokens, targets, weights, positions, starts."),
    ] = False


@command.command(cls=Command)
@with_options(PreviewOptions, PrintRowsOptions, PreferenceDataOptions, DataOptions)
def preview(data: Annotated[list[str], typer.Argument(metavar="DATA")], **overrides: Any) -> None:
    """Show the rows of DATA as they will be trained: tokens, text, and what is trained of it.

    DATA are files (text, JSON, CSV, Parquet), folders, globs, or - for standard input.
    """
    options, data_options = build(PreviewOptions, overrides), build(DataOptions, overrides)
    with avoid_compiling(data, data_options):
        preview_rows = open_rows(data, options, data_options, build(PreferenceDataOptions, overrides))
        for line in preview_rows.warnings:
            log_line(f"warning: {line}")
        if build(PrintRowsOptions, overrides).json:
            print_json(preview_rows.rows, options)
        else:
            print_rows(preview_rows.rows, options, preview_rows.tokenizer)
            print(
                "",
                *(make_printable(line, sys.stdout.encoding) for line in preview_rows.summary(options.batch)),
                sep="\n",
            )


def print_json(rows: "Batches", options: PreviewOptions) -> None:
    """Print rows as JSON lines."""
    for batch, number in first_rows(rows, options):
        names = ("tokens", "targets", "weights", "positions", "starts")
        row = {name: getattr(batch, name)[number].tolist() for name in names}
        print(json.dumps(row | ({"chosen": is_chosen(batch, number).tolist()} if batch.answers else {})))


def print_rows(rows: "Batches", options: PreviewOptions, tokenizer: "Tokenizer") -> None:
    """Print rows as text, with the trained parts highlighted."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    is_colored = console.color_system is not None
    console.print("trained text is " + ("green" if is_colored else "in [[ ]]"), markup=False)
    for index, (batch, number) in enumerate(first_rows(rows, options, once=True), 1):
        tokens = batch.tokens[number]
        ids = " ".join(map(str, tokens[:MAX_SHOWN])) + (" ..." if len(tokens) > MAX_SHOWN else "")
        row_samples = list(split_samples(batch, number))
        used, trained = count_tokens(row_samples)
        console.print(
            f"\nrow {index}: {used} of {len(tokens)} tokens, {trained} trained: {ids}", style="bold"
        )
        for sample, kind in zip(row_samples, sample_kinds(batch, number), strict=False):
            console.print(f"{kind}:" if kind else "", end=" " if kind else "", style="bold")
            console.print(highlight_trained(sample, tokenizer, console.encoding, is_colored))


def highlight_trained(
    sample: "tuple[np.ndarray, np.ndarray]", tokenizer: "Tokenizer", encoding: str, is_colored: bool
) -> "Text":
    """Return the text of a sample with the trained parts highlighted."""
    from rich.text import Text

    text = Text()
    for run, trained in split_runs(sample, tokenizer):
        words = make_printable(run, encoding, keep=KEPT_CHARS)
        if is_colored:
            text.append(words, style="green" if trained else "dim")
        else:
            text.append(f"[[{words}]]" if trained else words)
    return text
