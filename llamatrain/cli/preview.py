"""`llamatrain preview`: the rows as they will be trained."""

import json
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamatrain.cli.application import Command, application, options_of
from llamatrain.config.options import COUNT, Checked, Option, build
from llamatrain.config.shared import BATCH, JSON, SEED
from llamatrain.config.shared import CTX as ROW
from llamatrain.data.options import DataOptions
from llamatrain.errors import FileError
from llamatrain.machine.printable import printable
from llamatrain.machine.terminal import say
from llamatrain.model.architectures import USUAL
from llamatrain.recipe.preference import ComparedOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from rich.text import Text

    from llamatrain.data.corpus import Corpus
    from llamatrain.data.rows import Batch, Filling, Rows
    from llamatrain.data.tokenizer import Tokenizer
    from llamatrain.files.reader import Gguf

CTX = 512  # at most, where it is not given
SMALL = 250_000  # bytes, whose tokens are made in a few seconds without compiled code
SHOWN = 12  # token numbers of a row that are shown
ASKED = 64  # answers that are looked at for an end token
LINES = "\n\t"  # what a text keeps of its control characters
command = application()


@dataclass(frozen=True)
class PreviewOptions(Checked, panel="Rows"):
    model: Annotated[Path, Option("The GGUF file whose tokenizer and chat template are used.")]
    n: Annotated[int, Option("How many rows to show.", unit="ROWS", least=1, most=COUNT)] = 5
    json: Annotated[bool, replace(JSON, sentence="Print one JSON object a row: tokens, targets, weights, positions, starts.")] = (
        False
    )
    ctx: Annotated[int | None, ROW] = None
    batch: Annotated[int, replace(BATCH, sentence="Rows in a batch: they share a length.")] = 4
    seed: Annotated[int, replace(SEED, sentence="What the order of the samples follows from.")] = 0


@command.command(cls=Command)
@options_of(PreviewOptions, ComparedOptions, DataOptions)
def preview(data: Annotated[list[str], typer.Argument(metavar="DATA")], **said: Any) -> None:
    """Show the rows of DATA as they will be trained: tokens, text, and what is trained of it.

    DATA are files (text, JSON, CSV, Parquet), folders, globs, or - for standard input.
    """
    options, data_options = build(PreviewOptions, said), build(DataOptions, said)
    with waiting_for_no_compiler(data, data_options):
        previewed(data, options, data_options, build(ComparedOptions, said))


@contextmanager
def waiting_for_no_compiler(data: list[str], options: DataOptions) -> "Iterator[None]":
    """Where all is read in Python before a compiler would be done."""
    from llamatrain.data.sources import find_sources
    from llamatrain.machine.code import code

    size = sum(source.most for source in find_sources(data, options.mapping, raw=options.raw))
    with code.finding() if size < SMALL else nullcontext():
        yield


def previewed(data: list[str], options: PreviewOptions, data_options: DataOptions, compared: ComparedOptions) -> None:
    from llamatrain.data.compared_rows import rows_of
    from llamatrain.data.corpus import open_corpus
    from llamatrain.data.couples import KINDS
    from llamatrain.files.reader import open_gguf

    compare = compared.compare
    gguf = open_gguf(options.model)
    tokenizer = tokenizer_of(gguf)
    ctx = options.ctx or min(CTX, context_of(gguf))
    corpus, validation = open_corpus(data, tokenizer, data_options, ctx, options.seed, kind=KINDS[compare])
    rows = rows_of(compare)(corpus, data_options, options.seed, tokenizer.eos, tokenizer.bos)
    if endless(corpus, tokenizer, gguf):
        told = f"{gguf.path}: tokenizer.ggml.eos_token_id is no token, so answers are trained without an end where models stop"
        say(f"warning: {told}")
    if options.json:
        print_json(rows, options)
    else:
        print_rows(rows, options, tokenizer)
        summarise(corpus, validation, rows.filling(options.batch))


def tokenizer_of(gguf: "Gguf") -> "Tokenizer":
    from llamatrain.data.tokenizer import load

    owners = {"adapter": "an adapter: give its base model", "checkpoint": "a checkpoint: give the model that it trains"}
    if gguf.kind in owners and "tokenizer.ggml.model" not in gguf.metadata:
        raise FileError(f"{gguf.path}: has no vocabulary; this is {owners[gguf.kind]}")
    return load(gguf.metadata, gguf.path)


def context_of(gguf: "Gguf") -> int:
    key = f"{gguf.value('general.architecture', str, USUAL)}.context_length"
    if (length := gguf.value(key, int, CTX)) < 1:
        raise FileError(f"{gguf.path}: {key} is {length}, where 1 or more is needed")
    return length


def endless(corpus: "Corpus", tokenizer: "Tokenizer", gguf: "Gguf") -> bool:
    """Whether answers are trained to go on: what the file names as end is no token, and what stands in for it no end."""
    import numpy as np

    from llamatrain.files.constants import TokenType

    eos, kinds = tokenizer.eos, tokenizer.vocabulary.kinds
    if eos is not None and (eos == gguf.metadata.get("tokenizer.ggml.eos_token_id") or kinds[eos] == TokenType.CONTROL):
        return False
    answers = list(corpus.answers(ASKED))
    return bool(answers) and not any(np.any((tokens == tokenizer.eot) & (weights > 0)) for tokens, weights, _ in answers)


def taken(rows: "Rows", options: PreviewOptions, once: bool = False) -> "Iterator[tuple[Batch, int]]":
    """The first rows, each as its batch and its number therein; `once`: of packed ones no more than there are."""
    together = 1 if rows.packs else options.batch  # packed ones are all of one length
    for first in range(0, options.n, together):
        if once and rows.packs and rows.state.epoch:
            return
        batch = rows.batch(together)
        for number in range(min(together, options.n - first)):
            yield batch, number


def print_json(rows: "Rows", options: PreviewOptions) -> None:
    for batch, number in taken(rows, options):
        names = ("tokens", "targets", "weights", "positions", "starts")
        row = {name: getattr(batch, name)[number].tolist() for name in names}
        print(json.dumps(row | ({"chosen": is_chosen(batch, number).tolist()} if batch.compared else {})))


def print_rows(rows: "Rows", options: PreviewOptions, tokenizer: "Tokenizer") -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    coloured = console.color_system is not None
    console.print("trained text is " + ("green" if coloured else "in [[ ]]"), markup=False)
    for shown, (batch, number) in enumerate(taken(rows, options, once=True), 1):
        tokens = batch.tokens[number]
        ids = " ".join(map(str, tokens[:SHOWN])) + (" ..." if len(tokens) > SHOWN else "")
        found = list(samples(batch, number))
        used, trained = (sum(counts) for counts in zip(*((len(s) - 1, (w > 0).sum()) for s, w in found), strict=True))
        console.print(f"\nrow {shown}: {used} of {len(tokens)} tokens, {trained} trained: {ids}", style="bold")
        for sample, kind in zip(found, kinds(batch, number), strict=False):
            console.print(f"{kind}:" if kind else "", end=" " if kind else "", style="bold")
            console.print(marked(sample, tokenizer, console.encoding, coloured))


def samples(batch: "Batch", number: int) -> "Iterator[tuple[np.ndarray, np.ndarray]]":
    """Tokens with weights of each sample in a row, its first token, which is given, included; padding has no weight at all."""
    import numpy as np

    starts = batch.starts[number]
    for begin in np.unique(starts):
        own = starts == begin
        weights = batch.weights[number][own]
        if weights.any():
            yield (
                np.concatenate([batch.tokens[number][begin : begin + 1], batch.targets[number][own]]),
                np.concatenate([[0], weights]),
            )


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


def marked(sample: "tuple[np.ndarray, np.ndarray]", tokenizer: "Tokenizer", encoding: str, coloured: bool) -> "Text":
    """The text of a sample, with what is trained of it set apart."""
    import numpy as np
    from rich.text import Text

    tokens, weights = sample
    text = Text()
    changes = np.flatnonzero(np.diff(weights > 0)) + 1
    for run, trained in zip(np.split(tokens, changes), np.split(weights > 0, changes), strict=True):
        words = printable(tokenizer.decode(run).decode("utf-8", "replace"), encoding, keep=LINES)
        if coloured:
            text.append(words, style="green" if trained[0] else "dim")
        else:
            text.append(f"[[{words}]]" if trained[0] else words)
    return text


def summarise(corpus: "Corpus", validation: "Corpus | None", filling: "Filling") -> None:
    from llamatrain.data.corpus import named

    print(f"\n{len(corpus)} samples, {corpus.tokens} tokens", end="")
    print(f"; {len(validation)} samples to validate with" if validation else "")
    print(f"rows are {filling.used:.0%} full, {filling.trained:.0%} of their tokens are trained")
    found = {
        "cut: longer than a row": corpus.cut,
        "skipped: no token to train on in a row": corpus.skipped,
        "skipped: more than one row may take of time or memory": corpus.excessive,
    }
    for what, places in found.items():
        if places:
            print(f"{len(places)} {what} ({printable(named(places), sys.stdout.encoding)})")
