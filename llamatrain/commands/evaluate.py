"""Evaluates how well a model predicts some data, and compares it with another model."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from llamatrain.adapters.options import AdapterOptions
from llamatrain.commands.evaluation import Evaluation, Retrieval, summarize
from llamatrain.commands.exact_match import ExactMatchOptions, check_pattern, read_prompts, score_answers
from llamatrain.commands.opened_model import DEFAULT_CTX, OpenedModel, open_base, open_model
from llamatrain.config.common import BATCH, CTX, DEVICE, THREADS, DeviceName
from llamatrain.config.options import (
    COUNT,
    Option,
    Options,
    build,
    changed_options,
    reject_unused,
    unused_options,
)
from llamatrain.contrastive.options import ContrastiveOptions
from llamatrain.data.options import RERANK, DataOptions
from llamatrain.errors import LlamatrainError, UsageError
from llamatrain.preference.options import PreferenceOptions, check_evaluation

if TYPE_CHECKING:
    import numpy as np

    from llamatrain.data.batches import Batch, Batches
    from llamatrain.data.tokenizer import Tokenizer
    from llamatrain.train.evaluate import BatchLoss, LossMeter


@dataclass(frozen=True)
class EvaluateOptions(Options, panel="Evaluation"):
    """Options of an evaluation."""

    ctx: Annotated[int | None, CTX] = None
    batch: Annotated[int, BATCH] = 4
    threads: Annotated[int | None, THREADS] = None
    device: Annotated[DeviceName, DEVICE] = "cpu"
    precision: Annotated[Literal["f32", "bf16"], Option("Number type of matrix products.")] = "f32"
    compare: Annotated[
        Path | None,
        Option(
            "Evaluate this model, too, and compare both: a GGUF file, or `base` for MODEL without its adapters.",
            unit="FILE|base",
        ),
    ] = None
    choices: Annotated[
        tuple[Path, ...],
        Option(
            "Questions with several choices, as JSON lines or Parquet of HellaSwag, Winogrande, ARC, or {question, choices, "
            "answer}; may be repeated.",
            unit="FILE",
        ),
    ] = ()
    limit: Annotated[
        int | None,
        Option("Take only the first questions of each file.", unit="COUNT", least=1, most=COUNT),
    ] = None
    report: Annotated[
        Path | None,
        Option("Add the result to the page of this run.", unit="RUN"),
    ] = None


EVALUATE_OPTIONS = (
    EvaluateOptions,
    ExactMatchOptions,
    AdapterOptions,
    PreferenceOptions,
    ContrastiveOptions,
    DataOptions,
)


def evaluate_model(model: Path, data: Sequence[str], given: Mapping[str, Any]) -> Evaluation:
    """Evaluate a model on data, questions and prompts; `given` are options of EVALUATE_OPTIONS by name."""
    from llamatrain.commands.choices import read_questions, score_choices
    from llamatrain.report.render import check_run, read_run

    options, matching = build(EvaluateOptions, given), build(ExactMatchOptions, given)
    preference, data_options = build(PreferenceOptions, given), build(DataOptions, given)
    lora, contrastive = build(AdapterOptions, given), build(ContrastiveOptions, given)
    check_options(options, matching, preference, contrastive, lora, data_options, given)
    check_work(data, options, matching)
    check_pattern(matching)
    if options.report:
        check_run(options.report)
        read_run(options.report)
    files = [read_questions(path, options.limit) for path in options.choices]
    predicts_text = not preference.is_contrastive
    opened = [open_model(model, lora, options.threads, options.device, predicts_text)]
    opened += [open_base(opened[0], options.compare)] if options.compare else []
    prompts = read_prompts(opened, matching, data_options, options.ctx, options.limit)
    results = [Evaluation() for _ in opened]
    if data:
        results = evaluate_data(opened, data, options, data_options, preference, contrastive)
    if files:
        scores = score_choices(files, opened, options.ctx, options.batch, options.precision)
        results = [replace(result, choices=tuple(one)) for result, one in zip(results, scores, strict=True)]
    if prompts:
        matches = score_answers(opened, prompts, matching, options.ctx)
        results = [
            replace(result, exact_match=tuple(one)) for result, one in zip(results, matches, strict=True)
        ]
    result = replace(results[0], base=results[1]) if options.compare else results[0]
    if options.report:
        names = [*map(Path, data), *options.choices, *matching.exact_match]
        add_to_page(options.report, describe_evaluation(model, lora, options, names), result)
    return result


def evaluate_data(
    models: Sequence[OpenedModel],
    data: Sequence[str],
    options: EvaluateOptions,
    data_options: DataOptions,
    preference: PreferenceOptions,
    contrastive: ContrastiveOptions,
) -> list[Evaluation]:
    """Evaluate a model on data, and its base as well if there are two models."""
    from llamatrain.commands.rerank import evaluate_ranking

    if preference.objective == RERANK:
        rest = options.ctx, options.batch, options.precision
        return [evaluate_ranking(models[0], data, data_options, *rest)]
    rows = open_rows(data, models[0], data_options, options.ctx, preference)
    if preference.is_contrastive:
        return [evaluate_embeddings(models[0], rows, options, contrastive)]
    return evaluate_rows(models, rows, options, preference)


def describe_evaluation(
    model: Path, lora: AdapterOptions, options: EvaluateOptions, files: Sequence[Path]
) -> str:
    """Describe what was evaluated, for the page of a run."""
    adapters = [path.name + ("" if scale == 1 else f" * {scale:g}") for path, scale in lora.scaled]
    against = f", base: {options.compare.name}" if options.compare else ""
    limit = f", the first {options.limit:,} questions" if options.limit else ""
    return (
        f"{' + '.join([model.name, *adapters])}{against}, on {', '.join(file.name for file in files)}{limit}"
    )


def add_to_page(run: Path, title: str, result: Evaluation) -> None:
    """Keep a result in the folder of a run, and draw its page again."""
    from llamatrain.distributed.once import run_on_rank_zero
    from llamatrain.platform.terminal import log_line
    from llamatrain.report.evaluations import add_evaluation
    from llamatrain.report.render import draw_runs

    def draw() -> Path:
        add_evaluation(run, title, result.as_json())
        return draw_runs([run], None)[0]

    try:
        log_line(f"{run_on_rank_zero(draw)}: the page of the run has the result")
    except LlamatrainError as error:  # the result itself is still printed
        log_line(f"warning: {error}")


def check_options(
    options: EvaluateOptions,
    matching: ExactMatchOptions,
    preference: PreferenceOptions,
    contrastive: ContrastiveOptions,
    lora: AdapterOptions,
    data_options: DataOptions,
    given: Mapping[str, Any],
) -> None:
    """Raise if an option has no effect here, or if the objective cannot be evaluated."""
    classes = DataOptions, PreferenceOptions, ContrastiveOptions, ExactMatchOptions
    parts = data_options, preference, contrastive, matching
    values = {name: value for part in parts for name, value in vars(part).items()} | {"command": "evaluate"}
    reject_unused(unused_options(values, *classes), changed_options(given, *classes))
    check_evaluation(preference, options.batch, bool(lora.scaled))
    if options.compare and preference.objective:
        raise UsageError(
            "--compare and --objective exclude each other: an objective compares with the model alone already",
            code="conflicting-options",
        )
    if preference.is_contrastive and (options.choices or matching.exact_match):
        raise UsageError(
            "questions and --objective contrastive exclude each other: embeddings answer none; evaluate them apart",
            code="conflicting-options",
        )


def check_work(data: Sequence[str], options: EvaluateOptions, matching: ExactMatchOptions) -> None:
    """Raise if there is nothing to evaluate, or if --limit has nothing to limit."""
    has_questions = bool(options.choices or matching.exact_match)
    if not data and not has_questions:
        raise UsageError(
            "no data given; name files (text, JSON, CSV, Parquet), folders or globs, or questions with --choices or "
            "--exact-match",
            code="no-data",
        )
    if options.limit and not has_questions:
        raise UsageError(
            "--limit has no effect without --choices or --exact-match; leave it out", code="unused-option"
        )


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
    from llamatrain.run.row_kinds import KINDS

    kind = KINDS[preference.data_kind]
    tokenizer, ctx = model.tokenizer, ctx or min(DEFAULT_CTX, model.h.ctx)
    options_once = replace(data_options, shuffle=False, overlapping_samples=False)
    dataset, _ = run_once_per_host(
        lambda: open_dataset(data, tokenizer, options_once, ctx, 0, kind.dataset, "judge")
    )
    return kind.batches(dataset, data_options, 0, tokenizer.eos, tokenizer.bos)


def evaluate_embeddings(
    model: OpenedModel, rows: "Batches", options: EvaluateOptions, contrastive: ContrastiveOptions
) -> Retrieval:
    """Evaluate the embeddings of all groups of texts."""
    from llamatrain.commands.retrieval import evaluate_retrieval
    from llamatrain.contrastive.batches import GroupBatches
    from llamatrain.io.mapped_file import mapped_files, verify_unchanged

    assert isinstance(rows, GroupBatches)
    metadata, texts = model.gguf.metadata.raw_values, rows.dataset.texts_per_row
    programs = model.make_programs(
        rows.lengths,
        options.batch,
        options.precision,
        has_untrained_tokens=False,
        contrastive=contrastive.settings(model.h, metadata, texts, options.batch),
    )
    with verify_unchanged(mapped_files(model.arrays.values())):
        measured = evaluate_retrieval(programs, rows, options.batch)
    scores = measured.scores
    return Retrieval(
        loss=measured.loss,
        tokens=measured.tokens,
        recall_at_1=scores.recall[1],
        recall_at_5=scores.recall[5],
        recall_at_10=scores.recall[10],
        mrr_at_10=scores.mrr,
        ndcg_at_10=scores.ndcg,
        queries=scores.queries,
        candidates=scores.candidates,
    )


def evaluate_rows(
    models: Sequence[OpenedModel], rows: "Batches", options: EvaluateOptions, preference: PreferenceOptions
) -> list[Evaluation]:
    """Evaluate a model on all rows, and its base on the same ones if there are two models."""
    from llamatrain.commands.divergence import compare_batch
    from llamatrain.train.evaluate import LossMeter, evaluate_batch

    programs = [
        model.make_programs(
            rows.lengths,
            options.batch,
            options.precision,
            has_untrained_tokens=rows.has_untrained_tokens,
            objective=preference.built,
            with_logits=len(models) > 1,
        )
        for model in models
    ]
    meters = [LossMeter() for _ in range(3 if len(models) > 1 else 1)]

    def evaluate(batch: "Batch") -> "Sequence[BatchLoss]":
        if len(programs) == 1:
            return (evaluate_batch(programs[0], batch),)
        return compare_batch(programs[0], programs[1], batch)

    arrays = [array for model in models for array in model.arrays.values()]
    text_bytes = measure(rows, evaluate, meters, models[0].tokenizer, options.batch, arrays)
    results = [summarize(meter, text_bytes) for meter in meters[: len(models)]]
    if len(models) > 1:
        divergence = meters[2].score
        results[0] = replace(
            results[0],
            kl_divergence=divergence.loss,
            kl_divergence_error=divergence.loss_error,
            agreement=divergence.accuracy,
            agreement_error=divergence.accuracy_error,
        )
    return results


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
