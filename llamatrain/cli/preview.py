"""`llamatrain preview`: the rows as they will be trained."""

import json
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamatrain.cli.typer_app import Command, application, options_of
from llamatrain.commands.preview import (
    PreviewOptions,
    open_rows,
    runs_of,
    samples,
    taken,
    waiting_for_no_compiler,
)
from llamatrain.config.common import JSON
from llamatrain.config.options import Options, build
from llamatrain.data.options import DataOptions
from llamatrain.platform.escape import make_printable
from llamatrain.platform.terminal import log_line
from llamatrain.preference.options import PreferenceDataOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from rich.text import Text

    from llamatrain.data.batches import Batch, Batches, PackingStats
    from llamatrain.data.dataset import Dataset
    from llamatrain.data.tokenizer import Tokenizer

SHOWN = 12  # token numbers of a row that are shown
LINES = "\n\t"  # what a text keeps of its control characters
command = application()


@dataclass(frozen=True)
class PrintRowsOptions(Options, panel="Rows"):
    json: Annotated[
        bool,
        replace(JSON, sentence="Print one JSON object a row: tokens, targets, weights, positions, starts."),
    ] = False


@command.command(cls=Command)
@options_of(PreviewOptions, PrintRowsOptions, PreferenceDataOptions, DataOptions)
def preview(data: Annotated[list[str], typer.Argument(metavar="DATA")], **said: Any) -> None:
    """Show the rows of DATA as they will be trained: tokens, text, and what is trained of it.

    DATA are files (text, JSON, CSV, Parquet), folders, globs, or - for standard input.
    """
    options, data_options = build(PreviewOptions, said), build(DataOptions, said)
    with waiting_for_no_compiler(data, data_options):
        opened = open_rows(data, options, data_options, build(PreferenceDataOptions, said))
        for line in opened.warnings:
            log_line(f"warning: {line}")
        if build(PrintRowsOptions, said).json:
            print_json(opened.rows, options)
        else:
            print_rows(opened.rows, options, opened.tokenizer)
            summarise(opened.corpus, opened.validation, opened.rows.measure_packing(options.batch))


def print_json(rows: "Batches", options: PreviewOptions) -> None:
    for batch, number in taken(rows, options):
        names = ("tokens", "targets", "weights", "positions", "starts")
        row = {name: getattr(batch, name)[number].tolist() for name in names}
        print(json.dumps(row | ({"chosen": is_chosen(batch, number).tolist()} if batch.compared else {})))


def print_rows(rows: "Batches", options: PreviewOptions, tokenizer: "Tokenizer") -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    coloured = console.color_system is not None
    console.print("trained text is " + ("green" if coloured else "in [[ ]]"), markup=False)
    for shown, (batch, number) in enumerate(taken(rows, options, once=True), 1):
        tokens = batch.tokens[number]
        ids = " ".join(map(str, tokens[:SHOWN])) + (" ..." if len(tokens) > SHOWN else "")
        found = list(samples(batch, number))
        used, trained = (
            sum(counts) for counts in zip(*((len(s) - 1, (w > 0).sum()) for s, w in found), strict=True)
        )
        console.print(
            f"\nrow {shown}: {used} of {len(tokens)} tokens, {trained} trained: {ids}", style="bold"
        )
        for sample, kind in zip(found, kinds(batch, number), strict=False):
            console.print(f"{kind}:" if kind else "", end=" " if kind else "", style="bold")
            console.print(marked(sample, tokenizer, console.encoding, coloured))


def is_chosen(batch: "Batch", number: int) -> "np.ndarray":
    """Of each token of a row whether its answer is one to be preferred."""
    compared = batch.compared
    assert compared
    if len(compared.sides) == len(batch.tokens):
        return compared.chosen[number] | bool(compared.sides[number] > 0)
    return compared.chosen[number]


def kinds(batch: "Batch", number: int) -> "Iterator[str]":
    """What the samples of a row are to those that they are compared with."""
    import numpy as np

    starts, trained = batch.starts[number], batch.weights[number] > 0
    for begin in np.unique(starts[trained]):
        chosen = batch.compared and is_chosen(batch, number)[begin]
        yield "" if batch.compared is None else "chosen" if chosen else "rejected"


def marked(
    sample: "tuple[np.ndarray, np.ndarray]", tokenizer: "Tokenizer", encoding: str, coloured: bool
) -> "Text":
    """The text of a sample, with what is trained of it set apart."""
    from rich.text import Text

    text = Text()
    for run, trained in runs_of(sample, tokenizer):
        words = make_printable(run, encoding, keep=LINES)
        if coloured:
            text.append(words, style="green" if trained else "dim")
        else:
            text.append(f"[[{words}]]" if trained else words)
    return text


def summarise(corpus: "Dataset", validation: "Dataset | None", filling: "PackingStats") -> None:
    from llamatrain.data.dataset import format_places

    print(f"\n{len(corpus)} samples, {corpus.tokens} tokens", end="")
    print(f"; {len(validation)} samples to validate with" if validation else "")
    print(f"rows are {filling.used:.0%} full, {filling.trained:.0%} of their tokens are trained")
    found = {
        "cut: longer than a row": corpus.truncated,
        "skipped: no token to train on in a row": corpus.skipped,
        "skipped: more than one row may take of time or memory": corpus.too_large,
        "skipped: of no known form, or refused by the chat template": corpus.refused,
    }
    for what, places in found.items():
        if places:
            print(f"{len(places)} {what} ({make_printable(format_places(places), sys.stdout.encoding)})")
