"""Shows the first rows of some data as they will be trained."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from llamatrain.config.common import BATCH, SEED
from llamatrain.config.common import CTX as ROW
from llamatrain.config.options import COUNT, Option, Options
from llamatrain.data.options import DataOptions
from llamatrain.errors import FileError
from llamatrain.model.architectures import DEFAULT
from llamatrain.preference.options import PreferenceDataOptions, check_has_answers

if TYPE_CHECKING:
    import numpy as np

    from llamatrain.data.batches import Batch, Batches
    from llamatrain.data.dataset import Dataset
    from llamatrain.data.tokenizer import Tokenizer
    from llamatrain.gguf.reader import Gguf

DEFAULT_CTX = 512  # at most, where it is not given
SMALL_DATA = 250_000  # bytes that are tokenized in a few seconds without compiled code
CHECKED_ANSWERS = 64  # answers that are looked at for an end token


@dataclass(frozen=True)
class PreviewOptions(Options, panel="Rows"):
    """Options of `preview`."""

    model: Annotated[Path, Option("GGUF file whose tokenizer and chat template are used.")]
    n: Annotated[
        int,
        Option(
            "Number of rows to show; --json continues with the next epochs.", unit="ROWS", least=1, most=COUNT
        ),
    ] = 5
    ctx: Annotated[int | None, ROW] = None
    batch: Annotated[int, replace(BATCH, sentence="Rows per batch; they share a length.")] = 4
    seed: Annotated[int, replace(SEED, sentence="Seed of the order of samples.")] = 0


class PreviewRows(NamedTuple):
    """Opened rows, with their tokenizer, datasets and warnings."""

    rows: "Batches"
    tokenizer: "Tokenizer"
    dataset: "Dataset"
    validation: "Dataset | None"
    warnings: list[str]

    def summary(self, batch: int) -> Iterator[str]:
        """Yield lines with the counts of samples and tokens, and of what is cut or skipped."""
        from llamatrain.data.dataset import format_places

        data, packing = self.dataset, self.rows.measure_packing(batch)
        held_out = f"; {len(self.validation)} samples for validation" if self.validation else ""
        yield f"{len(data)} samples, {data.tokens} tokens{held_out}"
        yield f"rows are {packing.used:.0%} full, {packing.trained:.0%} of their tokens are trained"
        counts = {
            "cut: longer than a row": data.truncated,
            "skipped: no token to train on in a row": data.skipped,
            "skipped: took too much time or memory": data.too_large,
            "skipped: of no known form, or refused by the chat template": data.refused,
        }
        for reason, places in counts.items():
            if places:
                yield f"{len(places)} {reason} ({format_places(places)})"


@dataclass(frozen=True, kw_only=True)
class PreviewRow:
    """A row as it will be trained."""

    tokens: list[int]
    targets: list[int]  # the next token of each
    weights: list[float]  # 0 where nothing is trained
    positions: list[int]
    starts: list[int]  # the first token that each may see
    text: str  # the text of all samples
    trained: list[str]  # the trained parts of the text


def preview_rows(
    data: Sequence[str], options: PreviewOptions, data_options: DataOptions, preference: PreferenceDataOptions
) -> list[PreviewRow]:
    """Return the first rows; no sample occurs twice."""
    with avoid_compiling(data, data_options):
        opened = open_rows(data, options, data_options, preference)
        return [
            describe_row(batch, number, opened.tokenizer)
            for batch, number in first_rows(opened.rows, options, once=True)
        ]


def describe_row(batch: "Batch", number: int, tokenizer: "Tokenizer") -> PreviewRow:
    """Return a row with its text and the trained parts."""
    runs_by_sample = [split_runs(sample, tokenizer) for sample in split_samples(batch, number)]
    facts = {
        name: getattr(batch, name)[number].tolist()
        for name in ("tokens", "targets", "weights", "positions", "starts")
    }
    text = "".join(text for runs in runs_by_sample for text, _ in runs)
    return PreviewRow(
        **facts, text=text, trained=[text for runs in runs_by_sample for text, trained in runs if trained]
    )


def is_chosen(batch: "Batch", number: int) -> "np.ndarray":
    """Return for each token of a row whether it belongs to a chosen answer."""
    answers = batch.answers
    assert answers
    if len(answers.sides) == len(batch.tokens):
        return answers.chosen[number] | bool(answers.sides[number] > 0)
    return answers.chosen[number]


def sample_kinds(batch: "Batch", number: int) -> "Iterator[str]":
    """Yield "chosen" or "rejected" for each sample of a row, or empty texts without preferences."""
    import numpy as np

    starts, trained = batch.starts[number], batch.weights[number] > 0
    for begin in np.unique(starts[trained]):
        chosen = batch.answers and is_chosen(batch, number)[begin]
        yield "" if batch.answers is None else "chosen" if chosen else "rejected"


def count_tokens(samples: "Sequence[tuple[np.ndarray, np.ndarray]]") -> tuple[int, int]:
    """Return how many tokens of a row belong to its samples, and how many of them are trained."""
    return sum(len(tokens) - 1 for tokens, _ in samples), sum(
        int((weights > 0).sum()) for _, weights in samples
    )


def split_runs(sample: "tuple[np.ndarray, np.ndarray]", tokenizer: "Tokenizer") -> list[tuple[str, bool]]:
    """Split the text of a sample where training starts and stops."""
    import numpy as np

    tokens, weights = sample
    changes = np.flatnonzero(np.diff(weights > 0)) + 1
    parts = zip(np.split(tokens, changes), np.split(weights > 0, changes), strict=True)
    return [(tokenizer.decode(run).decode("utf-8", "replace"), bool(trained[0])) for run, trained in parts]


@contextmanager
def avoid_compiling(data: Sequence[str], options: DataOptions) -> Iterator[None]:
    """Compile nothing if the data is so small that Python reads it faster than a compiler starts."""
    from llamatrain.compiler.cache import code_cache
    from llamatrain.data.find_files import find_sources

    size = sum(source.max_size for source in find_sources(data, options.mapping, raw=options.raw))
    with code_cache.without_compiling() if size < SMALL_DATA else nullcontext():
        yield


def open_rows(
    data: Sequence[str], options: PreviewOptions, data_options: DataOptions, preference: PreferenceDataOptions
) -> PreviewRows:
    """Tokenize the data as a run would."""
    from llamatrain.data.dataset import open_dataset
    from llamatrain.gguf.reader import open_gguf
    from llamatrain.run.row_kinds import KINDS

    check_has_answers(preference)
    gguf = open_gguf(options.model)
    tokenizer = load_tokenizer(gguf)
    ctx = options.ctx or min(DEFAULT_CTX, read_context(gguf))
    kind = KINDS[preference.data_kind]
    dataset, validation = open_dataset(data, tokenizer, data_options, ctx, options.seed, kind=kind.dataset)
    rows = kind.batches(dataset, data_options, options.seed, tokenizer.eos, tokenizer.bos)
    warning = (
        f"{gguf.path}: tokenizer.ggml.eos_token_id is not a token, so answers are trained without an "
        "end token"
    )
    return PreviewRows(
        rows, tokenizer, dataset, validation, [warning] if lacks_end_token(dataset, tokenizer, gguf) else []
    )


def load_tokenizer(gguf: "Gguf") -> "Tokenizer":
    """Return the tokenizer of a file; raise if it has no vocabulary."""
    from llamatrain.data.tokenizer import load

    owners = {
        "adapter": "an adapter; give its base model",
        "checkpoint": "a checkpoint; give its model",
    }
    if gguf.kind in owners and "tokenizer.ggml.model" not in gguf.metadata:
        raise FileError(f"{gguf.path} has no vocabulary: this is {owners[gguf.kind]}", code="no-vocabulary")
    return load(gguf.metadata, gguf.path)


def read_context(gguf: "Gguf") -> int:
    """Return the context length of a model."""
    key = f"{gguf.get_value('general.architecture', str, DEFAULT)}.context_length"
    if (length := gguf.get_value(key, int, DEFAULT_CTX)) < 1:
        raise FileError(f"{gguf.path}: {key} must be at least 1 (got {length})", code="damaged-model")
    return length


def lacks_end_token(dataset: "Dataset", tokenizer: "Tokenizer", gguf: "Gguf") -> bool:
    """Return True if answers are trained without an end token, because the file names none that exists."""
    import numpy as np

    from llamatrain.gguf.constants import TokenType

    eos, kinds = tokenizer.eos, tokenizer.vocabulary.kinds
    if eos is not None and (
        eos == gguf.metadata.get("tokenizer.ggml.eos_token_id") or kinds[eos] == TokenType.CONTROL
    ):
        return False
    answers = list(dataset.first_answers(CHECKED_ANSWERS))
    return bool(answers) and not any(
        np.any((tokens == tokenizer.eot) & (weights > 0)) for tokens, weights, _ in answers
    )


def first_rows(rows: "Batches", options: PreviewOptions, once: bool = False) -> "Iterator[tuple[Batch, int]]":
    """Yield the first rows, each as its batch and its number; with `once` only those of the first epoch."""
    batch_size, limit = 1 if rows.packs else options.batch, options.n  # packed ones are all of one length
    if once and not rows.packs:
        limit = min(limit, len(rows.dataset))  # each begins with another sample
    for first in range(0, limit, batch_size):
        if once and rows.state.epoch:
            return
        batch = rows.batch(batch_size)
        for number in range(min(batch_size, limit - first)):
            yield batch, number


def split_samples(batch: "Batch", number: int) -> "Iterator[tuple[np.ndarray, np.ndarray]]":
    """Yield tokens and weights of each sample in a row, including its first token; padding has no weight."""
    import numpy as np

    starts = batch.starts[number]
    for begin in np.unique(starts):
        in_sample = starts == begin
        weights = batch.weights[number][in_sample]
        if weights.any():
            yield (
                np.concatenate([batch.tokens[number][begin : begin + 1], batch.targets[number][in_sample]]),
                np.concatenate([[0], weights]),
            )
