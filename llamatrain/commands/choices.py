"""Scores a model on questions with several choices, as EleutherAI's lm-evaluation-harness does.

A choice's score is the sum of the log-probabilities of its continuation's tokens. `acc` is the share of questions whose
right choice has the highest score; `acc_norm` divides each score by the characters of the choice first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llamatrain.commands.opened_model import OpenedModel
from llamatrain.data.batches import Segment, collate_rows
from llamatrain.data.choice_records import KEYS, Choice, Question, parse_question
from llamatrain.data.find_files import find_sources
from llamatrain.data.packing import best_fit
from llamatrain.distributed.comm import get_comm
from llamatrain.errors import DataError, LlamatrainError
from llamatrain.io.mapped_file import mapped_files, verify_unchanged
from llamatrain.platform.terminal import log_line, progress_bar
from llamatrain.train.evaluate import share_error

if TYPE_CHECKING:
    from llamatrain.data.tokenizer import Tokenizer
    from llamatrain.train.programs import EvalPrograms

ROOM = 512  # tokens of a row, unless a choice with its context has more


@dataclass(frozen=True, kw_only=True)
class ChoiceScore:
    """The shares of questions of a file that were answered right, with their standard errors."""

    file: str
    task: str
    questions: int
    acc: float
    acc_error: float | None  # None: it takes two questions
    acc_norm: float | None  # None: all continuations of a question are equal
    acc_norm_error: float | None

    def as_json(self) -> dict[str, Any]:
        """Return the values by name."""
        return {**vars(self)}


@dataclass(frozen=True)
class QuestionFile:
    """The questions of a file."""

    name: str
    task: str
    has_norm: bool
    questions: list[Question]


def read_questions(path: Path, limit: int | None) -> QuestionFile:
    """Read the first questions of a file, which must all have one form."""
    found, questions = None, list[Question]()
    for source in (replace(file, keys=KEYS) for file in find_sources([str(path)], use="judge")):
        if source.kind != "lines":
            raise DataError(
                f"{source.name}: questions must be JSON lines or Parquet, not text", code="not-json"
            )
        for number, line in islice(source.rows(), limit):
            known, question = parse_question(line, source.locate(number))
            if found not in (None, known):
                raise DataError(
                    f"{source.locate(number)}: a question of another form than those before it; put them into "
                    "files of their own",
                    code="mixed-questions",
                )
            found = known
            questions.append(question)
    if found is None:
        raise DataError(f"{path}: the file has no questions", code="empty-file")
    return QuestionFile(path.name, found.name, found.has_norm, questions)


def encode_choice(choice: Choice, tokenizer: "Tokenizer", ctx: int) -> tuple[np.ndarray, int]:
    """Return the tokens of a context with its continuation, and how many of them belong to the latter.

    Spaces at the end of the context belong to the continuation, as they are part of a word's token. Both are encoded
    as one text, whose tokens after as many as the context alone has are the continuation's. Tokens at the beginning
    are dropped if there are more than fit.
    """
    context = choice.context.rstrip()
    start = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
    first = len(start) + len(tokenizer.encode(context))
    tokens = [*start, *tokenizer.encode(choice.context + choice.continuation).tolist()]
    if first == 0:
        prefix = tokenizer.eos if tokenizer.bos is None else tokenizer.bos
        tokens, first = [*([] if prefix is None else [prefix]), *tokens], 1
    count = len(tokens) - first
    if not 1 <= count <= ctx:
        raise DataError(
            f"a choice must have 1 to {ctx:,} tokens (got {count:,}: {choice.continuation[:60]!r})",
            code="bad-question",
        )
    return np.array(tokens[-(ctx + 1) :], np.int32), count


def encode_questions(file: QuestionFile, tokenizer: "Tokenizer", ctx: int) -> list[Segment]:
    """Encode all choices of all questions, each with its context."""
    segments, cut = list[Segment](), 0
    for question in file.questions:
        for choice in question.choices:
            tokens, count = encode_choice(choice, tokenizer, ctx)
            weights = np.zeros(len(tokens) - 1, np.float32)
            weights[-count:] = 1
            cut += len(tokens) > ctx
            segments.append(Segment(tokens[:-1], tokens[1:], weights))
    if cut:
        log_line(f"{file.name}: {cut:,} choices reach the context of {ctx:,} tokens; what precedes it is cut")
    return segments


def score_choices(
    files: Sequence[QuestionFile], models: Sequence[OpenedModel], ctx: int | None, batch: int, precision: str
) -> list[list[ChoiceScore]]:
    """Return the scores of each model on each file."""
    results = [list[ChoiceScore]() for _ in models]
    for file in files:
        segments = encode_questions(file, models[0].tokenizer, ctx or min(model.h.ctx for model in models))
        room = max(min(ROOM, ctx or ROOM), *(len(segment.tokens) for segment in segments))
        for model, scores in zip(models, results, strict=True):
            programs = model.make_programs([room], batch, precision, has_untrained_tokens=True)
            with verify_unchanged(mapped_files(model.arrays.values())):
                sums = sum_log_probabilities(programs, segments, room, file.name)
            if not np.isfinite(sums).all():
                raise LlamatrainError(
                    f"{model.gguf.path}: probabilities of {file.name} are not finite: the weights of the model are "
                    "damaged or too large",
                    code="not-finite",
                )
            scores.append(judge(file, sums))
    return results


def sum_log_probabilities(
    programs: "EvalPrograms", segments: Sequence[Segment], room: int, name: str
) -> np.ndarray:
    """Return the sum of the log-probabilities of each segment's scored tokens. Ranks share the batches."""
    comm, sums = get_comm(), np.zeros(len(segments))
    rows = best_fit({index: len(segment.tokens) for index, segment in enumerate(segments)}, room)
    with progress_bar(f"choices of {name}", total=len(segments), unit=" choices") as progress:
        for start in range(0, len(rows), size := programs.spec.batch):
            group = rows[start : start + size]
            indices = [index for row in group for index in row]
            if start // size % comm.size == comm.rank:
                sums[indices] = score_rows(programs, group, segments, room)
            progress.update(len(indices))
    return np.sum(comm.all_gather(sums), axis=0)


def score_rows(
    programs: "EvalPrograms", group: Sequence[Sequence[int]], segments: Sequence[Segment], room: int
) -> np.ndarray:
    """Return the sums of a batch of rows, for each segment in their order."""
    padding = [list[Segment]()] * (programs.spec.batch - len(group))
    batch = collate_rows([[segments[index] for index in row] for row in group] + padding, room, 0)
    programs.eval_loss(batch)
    losses = programs.token_losses(batch).astype(np.float64)
    counts = [int(segments[index].weights.sum()) for row in group for index in row]
    return -np.add.reduceat(losses, np.cumsum([0, *counts[:-1]]))


def judge(file: QuestionFile, sums: np.ndarray) -> ChoiceScore:
    """Return the shares of questions whose right choice has the highest score."""
    right = list(judge_questions(file.questions, sums))
    acc, acc_norm = np.mean(right, axis=0).tolist()
    return ChoiceScore(
        file=file.name,
        task=file.task,
        questions=len(right),
        acc=acc,
        acc_error=share_error(acc, len(right)),
        acc_norm=acc_norm if file.has_norm else None,
        acc_norm_error=share_error(acc_norm, len(right)) if file.has_norm else None,
    )


def judge_questions(questions: Sequence[Question], sums: np.ndarray) -> Iterator[tuple[bool, bool]]:
    """Yield for each question whether the right choice has the highest sum, and the highest sum per character."""
    start = 0
    for question in questions:
        part = sums[start : start + len(question.choices)]
        start += len(question.choices)
        sizes = np.array([choice.size for choice in question.choices])
        with np.errstate(divide="ignore"):
            normed = part / sizes
        yield bool(part.argmax() == question.answer), bool(normed.argmax() == question.answer)
