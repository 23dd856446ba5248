"""`llamatrain evaluate`: how well a model predicts some data."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from llamatrain.cli.typer_app import MultiProcessCommand, make_app, parse_path, with_options
from llamatrain.commands.evaluate import EVALUATE_OPTIONS, evaluate_model
from llamatrain.commands.evaluation import Evaluation
from llamatrain.config.common import JSON
from llamatrain.config.options import Option, Options, build
from llamatrain.errors import UsageError
from llamatrain.platform.escape import make_printable
from llamatrain.run.request import check_model

ANSWERS_HEAD = b'{"file": '  # begins each file of answers
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
    answers_out: Annotated[
        Path | None,
        Option("Write the answers of --exact-match to this file, as JSON lines.", unit="FILE"),
    ] = None


@command.command(cls=MultiProcessCommand)
@with_options(*EVALUATE_OPTIONS[:2], PrintOptions, *EVALUATE_OPTIONS[2:])
def evaluate(
    model: Annotated[Path, typer.Argument(metavar="MODEL", parser=parse_path)],
    data: Annotated[list[str] | None, typer.Argument(metavar="DATA")] = None,
    **overrides: Any,
) -> None:
    """Loss, perplexity and bits per byte of MODEL, a GGUF file, on DATA; scores on questions.

    DATA are files (text, JSON, CSV, Parquet), folders, globs, or - for standard input. What counts is what
    would be trained: the answers of prompts and chats (--train-on all: their prompts, too), and all of a
    text, a row of --ctx tokens at a time. With --objective: how far answers that were chosen are above those
    that were rejected; with --objective contrastive or rerank: recall, MRR and NDCG.
    --choices and --exact-match score answers to questions. With --compare, a second model is evaluated as well,
    and the divergence between both.
    """
    printing, data = build(PrintOptions, overrides), list(data or ())
    check_model(str(model), data, "evaluate")
    if printing.answers_out:
        check_answers_out(printing.answers_out, overrides)
    evaluation = evaluate_model(model, data, overrides)
    if printing.answers_out:
        write_answers(printing.answers_out, evaluation)
    if printing.json:
        print(json.dumps(evaluation.as_json()))
    else:
        from llamatrain.report.evaluation_rows import format_table

        encoding = (sys.stdout.encoding or "ascii").lower()
        print(make_printable(format_table(evaluation.as_json(), encoding), encoding, keep="\n"))


def check_answers_out(file: Path, given: Mapping[str, Any]) -> None:
    """Raise if no answers are generated, or if the file cannot be written."""
    from llamatrain.report.output_file import check_output_file

    if not given.get("exact_match"):
        raise UsageError(
            "--answers-out has no effect without --exact-match; leave it out", code="unused-option"
        )
    check_output_file(file, (ANSWERS_HEAD,))


def write_answers(file: Path, evaluation: Evaluation) -> None:
    """Write the answers of all files as JSON lines, those of the base as well."""
    from llamatrain.distributed.comm import is_printing_rank
    from llamatrain.report.output_file import write_text

    lines = list[str]()
    models = {"model": evaluation, **({"base": evaluation.base} if evaluation.base else {})}
    for name, one in models.items():
        for score in one.exact_match:
            lines += [
                json.dumps({"file": score.file, "of": name, **vars(answer)}) for answer in score.answers
            ]
    if is_printing_rank():
        write_text(file, "".join(f"{line}\n" for line in lines))
