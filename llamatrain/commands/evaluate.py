"""Evaluates how well a model predicts some data, and compares it with another model."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from llamatrain.adapters.options import AdapterOptions
from llamatrain.commands.evaluation import Evaluation, summarize
from llamatrain.commands.opened_model import OpenedModel, open_base, open_model
from llamatrain.config.common import BATCH, CTX, DEVICE, THREADS, DeviceName
from llamatrain.config.options import (
    COUNT,
    Option,
    Options,
    changed_options,
    reject_unused,
    unused_options,
)
from llamatrain.data.options import DataOptions
from llamatrain.errors import UsageError
from llamatrain.preference.options import PreferenceOptions, check_evaluation

if TYPE_CHECKING:
    import numpy as np

    from llamatrain.commands.choices import QuestionFile
    from llamatrain.data.batches import Batch, Batches
    from llamatrain.data.tokenizer import Tokenizer
    from llamatrain.train.evaluate import BatchLoss, LossMeter

DEFAULT_CTX = 512  # at most, where it is not given


@dataclass(frozen=True)
class EvaluateOptions(Options, panel="Evaluation"):
    """Options of an evaluation."""

    ctx: Annotated[int | None, CTX] = None
    batch: Annotated[int, BATCH] = 4
    threads: Annotated[int | None, THREADS] = None
    device: Annotated[DeviceName, DEVICE] = "cpu"
    precision: Annotated[Literal["f32", "bf16"], Option("Number type of matrix products.")] = "f32"
    compare: Annotated[
        str,
        Option(
            "Evaluate this model, too, and compare both: a GGUF file, or `base` for MODEL without its adapters.",
            unit="FILE|base",
        ),
    ] = ""
    choices: Annotated[
        tuple[str, ...],
        Option(
            "Questions with several choices, as JSON lines of HellaSwag, Winogrande, ARC, or {question, choices, "
            "answer}; may be repeated.",
            unit="FILE",
        ),
    ] = ()
    limit: Annotated[
        int | None,
        Option("Take only the first questions of each file.", unit="COUNT", least=1, most=COUNT),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Retrieval(Evaluation):
    """The result for embeddings: how well they find the texts that answer queries, among all texts of the data.

    The loss is that of training, with as many rows as a batch has.
    """

    recall_at_1: float
    recall_at_5: float
    recall_at_10: float
    mrr_at_10: float  # the mean of one divided by the rank of the first text that answers the query
    ndcg_at_10: float
    queries: int
    candidates: int


def evaluate_model(
    model: Path,
    data: Sequence[str],
    options: EvaluateOptions,
    lora: AdapterOptions,
    data_options: DataOptions,
    preference: PreferenceOptions,
    contrastive: ContrastiveOptions,
    given: Mapping[str, Any],
) -> Evaluation:
    """Evaluate all data, a row at a time; `given` are the options as they were given, by name."""
    from llamatrain.commands.choices import read_questions

    changed = changed_options(given, DataOptions, PreferenceOptions)
    check_options(options, preference, lora, data_options, changed)
    check_work(data, options)
    files = [read_questions(path, options.limit) for path in options.choices]
    opened = open_model(model, lora, options.threads, options.device)
    base = open_base(opened, options.compare) if options.compare else None
    result = Evaluation(base=Evaluation() if base else None)
    if data:
        rows = open_rows(data, opened, data_options, options.ctx, preference)
        result = evaluate_rows(opened, base, rows, options, preference)
    if files:
        result = evaluate_choices(files, opened, base, options, result)
    return result


def check_work(data: Sequence[str], options: EvaluateOptions) -> None:
    """Raise if there is nothing to evaluate, or if options need what is missing."""
    if not data and not options.choices:
        raise UsageError(
            "no data given; name files (text, JSON, CSV, Parquet), folders or globs, or questions with --choices",
            code="no-data",
        )
    if options.limit and not options.choices:
        raise UsageError("--limit has no effect without --choices; leave it out", code="unused-option")


def evaluate_choices(
    files: "Sequence[QuestionFile]",
    model: OpenedModel,
    base: OpenedModel | None,
    options: EvaluateOptions,
    result: Evaluation,
) -> Evaluation:
    """Add the scores of files of questions to a result."""
    from llamatrain.commands.choices import score_choices

    opened = [model] if base is None else [model, base]
    scores, *base_scores = score_choices(files, opened, options.ctx, options.batch, options.precision)
    result = replace(result, choices=tuple(scores))
    if result.base:
        result = replace(result, base=replace(result.base, choices=tuple(base_scores[0])))
    return result


def open_rows(
    data: Sequence[str],
    model: OpenedModel,
    data_options: DataOptions,
    ctx: int | None,
    preference: PreferenceOptions,
) -> "Batches":
    """Open the data; each of its tokens is judged once."""
    from llamatrain.data.dataset import open_dataset
    from llamatrain.distributed.once import run_once_per_host
    from llamatrain.preference.batches import batches_class
    from llamatrain.preference.dataset import KINDS

    tokenizer, ctx = model.tokenizer, ctx or min(DEFAULT_CTX, model.h.ctx)
    options_once = replace(data_options, shuffle=False, overlapping_samples=False)
    dataset, _ = run_once_per_host(
        lambda: open_dataset(data, tokenizer, options_once, ctx, 0, kind.dataset, "judge")
    )
    return batches_class(preference.data_kind)(dataset, data_options, 0, tokenizer.eos, tokenizer.bos)


def check_options(
    options: EvaluateOptions,
    preference: PreferenceOptions,
    contrastive: ContrastiveOptions,
    lora: AdapterOptions,
    data_options: DataOptions,
    changed: Collection[str],
) -> None:
    """Raise if an option has no effect here, or if the objective cannot be evaluated."""
    values = {**vars(data_options), **vars(preference), **vars(contrastive), "command": "evaluate"}
    reject_unused(unused_options(values, DataOptions, PreferenceOptions, ContrastiveOptions), changed)
    check_evaluation(preference, options.batch, bool(lora.scaled))
    if options.compare and preference.objective:
        raise UsageError(
            "--compare and --objective exclude each other: an objective compares with the model alone already",
            code="conflicting-options",
        )


def evaluate_rows(
    model: OpenedModel,
    base: OpenedModel | None,
    rows: "Batches",
    options: EvaluateOptions,
    preference: PreferenceOptions,
) -> Evaluation:
    """Evaluate a model on all rows, and its base on the same ones if it has one."""
    from llamatrain.commands.divergence import compare_batch
    from llamatrain.train.evaluate import LossMeter, evaluate_batch

    opened = [model] if base is None else [base, model]
    programs = [
        one.make_programs(
            rows.lengths,
            options.batch,
            options.precision,
            has_untrained_tokens=rows.has_untrained_tokens,
            objective=preference.built,
            with_logits=base is not None,
        )
        for one in opened
    ]
    meters = [LossMeter() for _ in range(3 if base else 1)]

    def evaluate(batch: "Batch") -> "Sequence[BatchLoss]":
        if base is None:
            return (evaluate_batch(programs[0], batch),)
        return compare_batch(programs[0], programs[1], batch)

    arrays = [array for one in opened for array in one.arrays.values()]
    text_bytes = measure(rows, evaluate, meters, model.tokenizer, options.batch, arrays)
    if base is None:
        return summarize(meters[0], text_bytes)
    before, after = (summarize(meter, text_bytes) for meter in meters[:2])
    divergence = meters[2].score
    return replace(
        after,
        kl_divergence=divergence.loss,
        kl_divergence_error=divergence.loss_error,
        agreement=divergence.accuracy,
        agreement_error=divergence.accuracy_error,
        base=before,
    )


def measure(
    rows: "Batches",
    evaluate: "Callable[[Batch], Sequence[BatchLoss]]",
    meters: "Sequence[LossMeter]",
    tokenizer: "Tokenizer",
    batch: int,
    arrays: "Iterable[np.ndarray]",
) -> int:
    """Add the losses of all rows to the meters, and return the number of bytes that the scored tokens stand for.

    `arrays` are those of the models' files. Ranks share the batches.
    """
    import numpy as np

    from llamatrain.distributed.comm import get_comm
    from llamatrain.io.mapped_file import mapped_files, verify_unchanged
    from llamatrain.platform.terminal import progress_bar
    from llamatrain.train.evaluate import gather_batch_losses

    token_bytes, files, comm = tokenizer.byte_lengths, mapped_files(arrays), get_comm()
    text_bytes = 0

    def evaluate_batches() -> "Iterator[Sequence[BatchLoss]]":
        nonlocal text_bytes
        for row_batch in rows.one_epoch(batch, comm.rank, comm.size):
            with verify_unchanged(files):
                losses = evaluate(row_batch)
            text_bytes += int(np.sum(token_bytes[row_batch.targets[row_batch.weights > 0]]))
            progress.update(row_batch.samples * comm.size)
            yield losses

    with progress_bar("evaluating", total=len(rows.dataset), unit=" samples") as progress:
        for losses in gather_batch_losses(comm, evaluate_batches()):
            for meter, loss in zip(meters, losses, strict=True):
                meter.add(loss)
    return sum(comm.all_gather(text_bytes))
