"""Opens the training data of a run: tokenized text, or the built-in sine wave."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from llamatrain.data.batches import CursorState, PackingStats
from llamatrain.data.options import DataOptions
from llamatrain.data.sine import Sine
from llamatrain.data.supplied_rows import RowSource, SuppliedRows
from llamatrain.distributed.once import run_once_per_host
from llamatrain.errors import DataError, UsageError
from llamatrain.run.model import RunModel
from llamatrain.train.protocols import SkippableLoader

CHECKED_ROWS = 4  # rows of each file that are parsed before anything is compiled

if TYPE_CHECKING:
    from llamatrain.data.dataset import Dataset
    from llamatrain.data.preference_records import ComparedKind
    from llamatrain.data.tokenizer import Tokenizer
    from llamatrain.grpo.batches import PromptBatches
    from llamatrain.grpo.settings import Grpo


class CountedBatches(SkippableLoader, Protocol):
    """Batches that can be counted, resumed anywhere, and ended with an epoch."""

    end: int  # the epoch before which they end; 0: never

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths that rows may have, in tokens."""

    @property
    def has_untrained_tokens(self) -> bool:
        """True if many tokens are not trained."""

    def restore(self, state: CursorState) -> bool:
        """Continue where a checkpoint was; return False if the data has changed."""

    def count(self, epochs: int) -> int:
        """Return the number of rows in a number of epochs."""

    def measure_packing(self, count: int) -> PackingStats:
        """Return how full the first `count` rows are."""


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The training and validation batches of a run, and facts about them."""

    rows: CountedBatches
    validation: CountedBatches | None
    retained: CountedBatches | None = None  # what should not be forgotten
    description: str
    samples: int | None = None  # per epoch; None: endless
    packed: bool = False
    prompts: "PromptBatches | None" = None  # the rows, if their answers are generated
    texts_per_row: int = 0  # in a group whose embeddings are compared

    @property
    def scored(self) -> list[CountedBatches]:
        """The batches whose loss is measured at each validation."""
        return [rows for rows in (self.validation, self.retained) if rows is not None]

    def describe_packing(self, batch: int) -> str:
        """Describe how full the rows are, if they are not always full."""
        if self.prompts or not self.rows.has_untrained_tokens:
            return ""
        used, trained = (f"{100 * part:.0f} %" for part in self.rows.measure_packing(batch))
        return f"rows are {used} full, {trained} of their tokens are trained"


def load_data(
    files: Sequence[str],
    model: RunModel,
    data: DataOptions,
    seed: int,
    compare: "ComparedKind | None" = None,
    supplied: RowSource | None = None,
) -> TrainingData:
    """Open, tokenize, count and split the data, unless a Python program supplies its rows."""
    if supplied is not None:
        rows = SuppliedRows(supplied, model.h.vocab, model.row_length, seed)
        return TrainingData(rows=rows, validation=None, description="rows that a Python program supplies")
    if not files:
        sine = make_sine(model, seed)
        return TrainingData(
            rows=sine, validation=None, description=f"the built-in sine wave in {sine.levels - 1} levels"
        )
    from llamatrain.data.dataset import format_places, open_dataset
    from llamatrain.data.find_files import skipped_files
    from llamatrain.run.row_kinds import KINDS, widen_groups

    tokenizer = model.tokenizer
    if tokenizer is None:
        raise UsageError(
            "the model has no text vocabulary, so it cannot be trained on text", code="no-vocabulary"
        )
    kind = KINDS[compare]
    dataset, validation_set = run_once_per_host(
        lambda: open_dataset(files, tokenizer, data, model.row_length, seed, kind=kind.dataset)
    )
    texts_per_row = widen_groups(dataset, validation_set)
    if compare and data.as_ != "rest":
        check_skipped(dataset, model.row_length)
    batches = kind.batches(dataset, data, seed, tokenizer.eos, tokenizer.bos)
    validation = (
        kind.batches(validation_set, data, seed, tokenizer.eos, tokenizer.bos) if validation_set else None
    )
    retained_set = None
    if data.retain_data:
        retained_set = run_once_per_host(lambda: open_retained(tokenizer, data, model.row_length, seed))
    facts = [f"{len(dataset):,} {kind.unit}, {dataset.tokens:,} tokens"]
    facts += [f"{len(validation_set):,} {kind.unit} for validation"] if validation_set else []
    facts += [f"{len(retained_set):,} {kind.unit} to retain"] if retained_set else []
    skipped_rows = {
        f"cut to {model.row_length} tokens": dataset.truncated,
        f"skipped, without a token to train on within {model.row_length} tokens": dataset.skipped,
        "skipped, because they take too much time or memory": dataset.too_large,
        "skipped, because they cannot be used": dataset.refused,
    }
    facts += [
        f"{len(places):,} {reason} ({format_places(places)})"
        for reason, places in skipped_rows.items()
        if places
    ]
    facts += (
        [f"{others} ignored"] if (others := skipped_files([*files, *data.val, *data.retain_data])) else []
    )
    return TrainingData(
        rows=batches,
        validation=validation,
        retained=kind.batches(retained_set, data, seed, tokenizer.eos, tokenizer.bos)
        if retained_set
        else None,
        description="; ".join(facts),
        samples=len(dataset),
        packed=batches.packs,
        texts_per_row=texts_per_row,
    )


def load_prompts(
    files: Sequence[str], model: RunModel, data: DataOptions, seed: int, settings: "Grpo"
) -> TrainingData:
    """Read the prompts whose answers are to be generated, and split them."""
    from llamatrain.data.find_files import find_data, find_sources
    from llamatrain.data.prompt_records import read_prompts
    from llamatrain.grpo.batches import PromptBatches, split_prompts

    tokenizer, ctx = model.tokenizer, model.row_length
    if tokenizer is None:
        raise UsageError(
            "the model has no text vocabulary, so it cannot answer prompts", code="no-vocabulary"
        )
    found = find_data(files, data.mapping, "train")
    sources = find_sources(data.val, data.mapping, "validate") if data.val else found.validation
    prompts = read_prompts(found.sources, tokenizer, data, ctx)
    if data.val_split:
        prompts, held_out = split_prompts(prompts, data.val_split, seed)
        if not prompts:
            raise DataError(
                "all prompts are held out; lower --val-split, or name more data", code="no-prompt"
            )
    else:
        held_out = read_prompts(sources, tokenizer, data, ctx) if sources else []
    padding = next((token for token in (tokenizer.eos, tokenizer.bos) if token is not None), 0)
    rows, validation = (
        PromptBatches(part, settings, ctx, data, seed, padding) if part else None
        for part in (prompts, held_out)
    )
    assert rows
    facts = [f"{len(prompts):,} prompts"] + ([f"{len(held_out):,} for validation"] if held_out else [])
    return TrainingData(
        rows=rows, validation=validation, description=", ".join(facts), samples=len(prompts), prompts=rows
    )


def open_retained(tokenizer: "Tokenizer", data: DataOptions, row_length: int, seed: int) -> "Dataset":
    """Open the data that should not be forgotten; each of its tokens is scored once."""
    from llamatrain.data.dataset import open_dataset

    options = replace(data, val=(), val_split=0.0, overlapping_samples=False)
    return open_dataset(data.retain_data, tokenizer, options, row_length, seed, use="validate")[0]


def check_first_rows(files: Sequence[str], data: DataOptions, compare: "ComparedKind | None") -> None:
    """Parse the first rows of each file, so that errors show before anything is compiled."""
    from llamatrain.data.contrastive_records import check_has_groups, parse_group
    from llamatrain.data.find_files import find_sources
    from llamatrain.data.json_values import RecordTooLarge
    from llamatrain.data.preference_records import check_has_rows, is_preference, parse_preference
    from llamatrain.data.records import parse_record

    sources = find_sources(files, data.mapping, raw=data.raw)
    if is_preference(compare):
        check_has_rows(sources, compare)
    elif compare:
        check_has_groups(sources)
    for source in sources:
        for number, line in islice(source.rows(), CHECKED_ROWS) if source.kind == "lines" else ():
            # reported when the row is skipped
            with suppress(RecordTooLarge, *([DataError] if data.skip_bad_rows else [])):
                if is_preference(compare):
                    parse_preference(line, source.locate(number), compare, source.columns)
                elif compare:
                    parse_group(line, source.locate(number), source.columns)
                else:
                    parse_record(line, source.locate(number), source.columns)


def first_group_size(files: Sequence[str], data: DataOptions) -> int:
    """Return the most texts of a group in the first rows of each file."""
    from llamatrain.data.contrastive_records import parse_group
    from llamatrain.data.find_files import find_sources

    sizes = [2]
    for source in find_sources(files, data.mapping, raw=data.raw):
        for number, line in islice(source.rows(), CHECKED_ROWS) if source.kind == "lines" else ():
            with suppress(DataError):
                sizes.append(len(parse_group(line, source.locate(number), source.columns).texts))
    return max(sizes)


def check_skipped(dataset: "Dataset", row: int) -> None:
    """Raise if most preference rows had to be skipped."""
    from llamatrain.data.dataset import format_places

    skipped = [*dataset.skipped, *dataset.too_large, *dataset.refused]
    if len(skipped) > len(dataset):
        raise DataError(
            f"{len(skipped):,} of {len(skipped) + len(dataset):,} rows have no answer within {row} tokens "
            f"({format_places(skipped)}); raise --ctx, or add --as rest to train on the others",
            code="most-rows-skipped",
        )


def make_sine(model: RunModel, seed: int) -> Sine:
    """Return the built-in sine wave for a model without a text vocabulary."""
    if model.tokenizer is not None:
        raise UsageError(
            "no data given; name files (text, JSON, CSV, Parquet), folders, globs, or - for standard input",
            code="no-data",
        )
    return Sine(model.h.vocab, model.row_length, seed)
