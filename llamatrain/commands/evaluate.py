"""Evaluates how well a model predicts some data."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from llamatrain.adapters.options import AdapterOptions
from llamatrain.config.common import BATCH, CTX, DEVICE, THREADS, DeviceName
from llamatrain.config.options import Option, Options, changed_options, reject_unused, unused_options
from llamatrain.contrastive.options import ContrastiveOptions
from llamatrain.data.options import DataOptions
from llamatrain.errors import FileError
from llamatrain.preference.options import PreferenceOptions, check_evaluation

if TYPE_CHECKING:
    import numpy as np

    from llamatrain.commands.retrieval import MeasuredGroups
    from llamatrain.data.batches import Batches
    from llamatrain.data.tokenizer import Tokenizer
    from llamatrain.gguf.reader import Gguf
    from llamatrain.train.evaluate import LossMeter
    from llamatrain.train.graphs import StepSpec
    from llamatrain.train.programs import EvalPrograms

DEFAULT_CTX = 512  # at most, where it is not given


@dataclass(frozen=True)
class EvaluateOptions(Options, panel="Evaluation"):
    """Options of an evaluation."""

    ctx: Annotated[int | None, CTX] = None
    batch: Annotated[int, BATCH] = 4
    threads: Annotated[int | None, THREADS] = None
    device: Annotated[DeviceName, DEVICE] = "cpu"
    precision: Annotated[Literal["f32", "bf16"], Option("Number type of matrix products.")] = "f32"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of an evaluation: means over the tokens that count."""

    loss: float
    perplexity: float | None  # None: answers are compared
    bits_per_byte: float | None  # None: its tokens stand for no text
    tokens: int
    loss_error: float | None = (
        None  # the standard error of the mean; None: it takes two samples, pairs or answers
    )
    accuracy: float | None = (
        None  # the part of the tokens that were held likeliest, or of the answers judged as they should be
    )
    accuracy_error: float | None = None
    margin: float | None = None  # reward margin of compared answers
    reward_chosen: float | None = None
    reward_rejected: float | None = None
    answers: int | None = None  # or pairs
    notes: tuple[str, ...] = ()


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
    from llamatrain.adapters.load_adapted import load_with_adapters
    from llamatrain.commands.retrieval import evaluate_retrieval
    from llamatrain.contrastive.batches import GroupBatches
    from llamatrain.data.dataset import open_dataset
    from llamatrain.distributed.cores import count_cores
    from llamatrain.distributed.once import run_once_per_host
    from llamatrain.engine.device import create_device, resolve_device
    from llamatrain.gguf.reader import open_gguf
    from llamatrain.io.mapped_file import mapped_files, verify_unchanged
    from llamatrain.run.row_kinds import KINDS
    from llamatrain.train.graphs import StepSpec

    changed = changed_options(given, DataOptions, PreferenceOptions, ContrastiveOptions)
    check_options(options, preference, contrastive, lora, data_options, changed)
    gguf, threads = open_gguf(model), options.threads or count_cores()
    device = resolve_device(options.device)
    is_contrastive = preference.is_contrastive
    h, weights, arrays = load_with_adapters(
        gguf, lora, threads, create_device(device).can_decode, predicts_text=not is_contrastive
    )
    tokenizer = load_tokenizer(gguf, h.vocab)
    # each token is judged once
    options_once = replace(data_options, shuffle=False, overlapping_samples=False)
    ctx = options.ctx or min(DEFAULT_CTX, h.ctx)
    kind = KINDS[preference.data_kind]
    dataset, _ = run_once_per_host(
        lambda: open_dataset(data, tokenizer, options_once, ctx, 0, kind.dataset, "judge")
    )
    rows = kind.batches(dataset, data_options, 0, tokenizer.eos, tokenizer.bos)
    spec = StepSpec(
        h=h,
        weights=weights,
        trainable={},
        batch=options.batch,
        rope_length=max(rows.lengths),
        precision=options.precision,
        threads=threads,
        kernels=device,
        has_untrained_tokens=rows.has_untrained_tokens,
        objective=preference.built,
        reference=replace(weights, deltas={}),
        contrastive=contrastive.settings(
            h, gguf.metadata.raw_values, rows.dataset.texts_per_row, options.batch
        )
        if isinstance(rows, GroupBatches)
        else None,
    )
    if isinstance(rows, GroupBatches):
        with verify_unchanged(mapped_files(arrays.values())):
            programs = make_programs(gguf, spec, arrays, rows.lengths)
            return describe_retrieval(evaluate_retrieval(programs, rows, options.batch))
    return score(
        make_programs(gguf, spec, arrays, rows.lengths), rows, tokenizer, options.batch, arrays.values()
    )


def describe_retrieval(measured: "MeasuredGroups") -> Retrieval:
    """Return the result for embeddings."""
    scores = measured.scores
    return Retrieval(
        loss=measured.loss,
        perplexity=None,
        bits_per_byte=None,
        tokens=measured.tokens,
        recall_at_1=scores.recall[1],
        recall_at_5=scores.recall[5],
        recall_at_10=scores.recall[10],
        mrr_at_10=scores.mrr,
        ndcg_at_10=scores.ndcg,
        queries=scores.queries,
        candidates=scores.candidates,
    )


def load_tokenizer(gguf: "Gguf", embeddings: int) -> "Tokenizer":
    """Return the model's tokenizer; raise if it has more tokens than the model has embeddings."""
    from llamatrain.data.tokenizer import load

    tokenizer = load(gguf.metadata, gguf.path)
    if len(tokenizer) > embeddings:
        raise FileError(
            f"{gguf.path}: the vocabulary has {len(tokenizer)} tokens, but there are {embeddings} embeddings",
            code="damaged-model",
        )
    return tokenizer


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


def make_programs(
    gguf: "Gguf", spec: "StepSpec", arrays: "Mapping[str, np.ndarray]", lengths: Sequence[int]
) -> "EvalPrograms":
    """Build the evaluation programs for rows of some lengths, if there is memory for them."""
    from llamatrain.model.load import check_memory
    from llamatrain.train.graphs import StepGraphs
    from llamatrain.train.programs import EvalPrograms

    graphs = StepGraphs(spec)
    plans = [graphs.plan(graphs.eval_graph(length)) for length in lengths]
    if spec.contrastive:
        plans.append(graphs.plan(graphs.comparison_graph()))
    if spec.device.memory_limit() is None:
        check_memory(
            gguf, max(plan.total - plan.role_bytes("state") for plan in plans), "a smaller --ctx or --batch"
        )
    memory = {name: spec.device.upload(array) for name, array in arrays.items()}
    return EvalPrograms(graphs, memory, max(plan.arena for plan in plans))


def score(
    programs: "EvalPrograms",
    rows: "Batches",
    tokenizer: "Tokenizer",
    batch: int,
    arrays: "Iterable[np.ndarray]",
) -> Evaluation:
    """Evaluate rows; `arrays` are those of the model's file. Ranks share the batches."""
    import numpy as np

    from llamatrain.distributed.comm import get_comm
    from llamatrain.io.mapped_file import mapped_files, verify_unchanged
    from llamatrain.platform.terminal import progress_bar
    from llamatrain.train.evaluate import BatchLoss, LossMeter, evaluate_batch, gather_batch_losses

    token_bytes, files, comm = tokenizer.byte_lengths, mapped_files(arrays), get_comm()
    meter, text_bytes = LossMeter(), 0

    def evaluate_batches() -> Iterator[BatchLoss]:
        nonlocal text_bytes
        for row_batch in rows.one_epoch(batch, comm.rank, comm.size):
            with verify_unchanged(files):
                one = evaluate_batch(programs, row_batch)
            text_bytes += int(np.sum(token_bytes[row_batch.targets[row_batch.weights > 0]]))
            progress.update(row_batch.samples * comm.size)
            yield one

    with progress_bar("evaluating", total=len(rows.dataset), unit=" samples") as progress:
        for one in gather_batch_losses(comm, evaluate_batches()):
            meter.add(one)
    return summarize(meter, sum(comm.all_gather(text_bytes)))


def summarize(meter: "LossMeter", text_bytes: int) -> Evaluation:
    """Return the result from the losses and the number of bytes of text."""
    from llamatrain.platform.terminal import log_line

    score, notes = meter.score, list[str]()
    loss, alone = score.loss, score.answers is None
    if not math.isfinite(loss):
        notes.append(f"the loss is {loss}: the weights of the model are damaged or too large")
        log_line(f"warning: {notes[0]}")
    return Evaluation(
        loss=loss,
        perplexity=math.exp(min(loss, 700)) if alone else None,
        bits_per_byte=math.fsum(meter.losses) / math.log(2) / text_bytes if text_bytes and alone else None,
        tokens=score.tokens,
        loss_error=score.loss_error,
        accuracy=score.accuracy,
        accuracy_error=score.accuracy_error,
        margin=score.margin,
        reward_chosen=score.reward_chosen,
        reward_rejected=score.reward_rejected,
        answers=score.answers,
        notes=tuple(notes),
    )
