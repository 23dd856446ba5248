"""`llamatrain evaluate`: how well a model foretells some data."""

import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from llamatrain.adapters.options import LoraOptions
from llamatrain.cli.application import Command, application, options_of
from llamatrain.recipe.loading import opened
from llamatrain.config.options import Checked, Option, build, flag_of
from llamatrain.config.shared import BATCH, JSON, THREADS
from llamatrain.config.shared import CTX as ROW
from llamatrain.data.options import DataOptions
from llamatrain.errors import FileError, UsageError

if TYPE_CHECKING:
    from llamatrain.data.rows import Rows
    from llamatrain.data.tokenizer import Tokenizer
    from llamatrain.train.programs import Runner

MEANINGLESS = ("val", "val_split", "shuffle", "overlapping_samples", "fill_with_next_samples", "separate_with_eos",
               "separate_with_bos", "sample_random_offsets", "force_reshuffle")  # fmt: skip
CTX = 512  # at most, where it is not given


command = application()


@dataclass(frozen=True)
class EvaluateOptions(Checked, panel="Evaluation"):
    ctx: Annotated[int | None, ROW] = None
    batch: Annotated[int, BATCH] = 4
    threads: Annotated[int | None, THREADS] = None
    precision: Annotated[Literal["f32", "bf16"], Option("Of matrix products.")] = "f32"
    json: Annotated[bool, replace(JSON, sentence="Print one JSON object: loss, perplexity, bits_per_byte, tokens.")] = False


@command.command(cls=Command)
@options_of(EvaluateOptions, LoraOptions, DataOptions)
def evaluate(
    model: Annotated[Path, typer.Argument(metavar="MODEL")],
    data: Annotated[list[str], typer.Argument(metavar="DATA")],
    **said: Any,
) -> None:
    """Loss, perplexity and bits per byte of MODEL, a GGUF file, on DATA.

    DATA are files (.txt, .md, .jsonl), folders, globs, or - for standard input. What counts is what would be trained: the
    answers of prompts and chats (--train-on all: their prompts, too), and all of a text, a row of --ctx tokens at a time.
    """
    from llamatrain.data.corpus import open_corpus
    from llamatrain.data.rows import Rows
    from llamatrain.data.tokenizer import load as load_tokenizer
    from llamatrain.files.reader import open_gguf
    from llamatrain.machine.units import cores
    from llamatrain.model.load import check_memory
    from llamatrain.train.graphs import RunGraphs, Setting
    from llamatrain.train.programs import Runner

    options, data_options = build(EvaluateOptions, said), build(DataOptions, said)
    for name in MEANINGLESS:
        if name in said:
            raise UsageError(f"{flag_of(name)} means nothing here: all DATA is evaluated, each token once; leave it out")
    gguf, threads = open_gguf(model), options.threads or cores()
    h, weights, arrays = opened(gguf, build(LoraOptions, said), threads)
    tokenizer = load_tokenizer(gguf.metadata, model)
    if len(tokenizer) > h.vocab:
        raise FileError(f"{model}: its vocabulary has {len(tokenizer)} tokens, its embeddings {h.vocab}")
    ctx = options.ctx or min(CTX, h.ctx)
    # each token is judged once
    corpus, _ = open_corpus(data, tokenizer, replace(data_options, shuffle=False, overlapping_samples=False), ctx, 0)
    rows = Rows(corpus, data_options, 0, tokenizer.eos, tokenizer.bos)
    graphs = RunGraphs(
        Setting(
            h=h,
            weights=weights,
            trained={},
            batch=options.batch,
            positions=max(rows.lengths),
            precision=options.precision,
            threads=threads,
        )
    )
    plans = [graphs.plan(graphs.loss(length)) for length in rows.lengths]
    check_memory(gguf, max(plan.total - plan.bytes("state") for plan in plans), "a smaller --ctx or --batch")
    found = score(Runner(graphs, arrays, max(plan.arena for plan in plans)), rows, tokenizer, options.batch)
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        if value is not None:
            print(f"{name.replace('_', ' '):14} {value:,}" if name == "tokens" else f"{name.replace('_', ' '):14} {value:.6g}")


def score(runner: "Runner", rows: "Rows", tokenizer: "Tokenizer", batch: int) -> dict[str, float | None]:
    """A mean over the tokens that count."""
    import numpy as np
    from tqdm import tqdm

    texts = tokenizer.lengths
    losses, tokens, text = list[float](), 0, 0
    with tqdm(total=len(rows.corpus), desc="evaluating", unit=" rows", leave=False, disable=None, delay=0.5) as bar:
        for each in rows.once(batch):
            losses.append(runner.loss(each))
            counted = each.targets[each.weights > 0]
            tokens += counted.size
            text += int(np.sum(texts[counted]))
            bar.update(batch)
    loss = math.fsum(losses) / tokens
    if not math.isfinite(loss):
        print(f"warning: the loss is {loss}: the model's weights are damaged, or too large", file=sys.stderr)
    return {
        "loss": finite(loss),
        "perplexity": finite(math.exp(min(loss, 700))),
        "bits_per_byte": finite(math.fsum(losses) / math.log(2) / text) if text else None,
        "tokens": tokens,
    }


def finite(value: float) -> float | None:
    """As JSON can have it."""
    return value if math.isfinite(value) else None
