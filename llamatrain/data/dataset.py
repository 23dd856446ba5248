"""Numbers the samples of all files, with their positions, lengths and trained tokens."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llamatrain.config.options import format_flag
from llamatrain.data.chat.prompt import TokenizerLike
from llamatrain.data.encode import REFUSED, TOO_LARGE, Encoder
from llamatrain.data.files import DataFile
from llamatrain.data.find_files import Use, check_disjoint, describe_files, find_data, find_sources
from llamatrain.data.options import DataOptions
from llamatrain.data.preference_records import ComparedKind
from llamatrain.data.shuffle import Permutation
from llamatrain.data.token_cache import TokenStore
from llamatrain.errors import DataError
from llamatrain.platform.terminal import log_line

MAX_LISTED = 3  # places that a message lists before it counts the rest
GROUP_BYTES = 64 * 10**6  # bytes of small files that share a cache entry


@dataclass(frozen=True)
class Shard:
    """The documents of some files.

    A row takes `ctx` targets of a document; `bos_count` is 1 if a begin token precedes each row, else 0.
    """

    sources: list[DataFile]
    store: TokenStore
    documents: np.ndarray  # of token_cache.DOCUMENT
    ctx: int
    bos_count: int
    overlapping: bool

    @property
    def is_full_text(self) -> bool:
        """True if all rows are full except the last of each document."""
        return self.sources[0].kind == "text" and not self.documents["single"].any()

    @cached_property
    def counts(self) -> np.ndarray:
        """The number of samples in each document, as the dataset numbers them."""
        return self.reachable_counts

    @cached_property
    def reachable_counts(self) -> np.ndarray:
        """The number of samples in each document; 0 if no trained token is within reach."""
        size = self.documents["size"]
        first = self.documents["first"]
        targets = size - 1 + self.bos_count
        windows = np.maximum(size - self.ctx, 1) if self.overlapping else -(-targets // self.ctx)
        reached = (first >= 0) & (first <= self.ctx - self.bos_count) & (targets > 0)
        return np.where(reached, np.where(self.documents["single"], 1, windows), 0)

    @cached_property
    def ends(self) -> np.ndarray:
        """The number of samples up to and including each document."""
        return np.cumsum(self.counts)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def sizes(self) -> np.ndarray:
        """The number of tokens in each sample."""
        documents = np.repeat(self.documents, self.counts)
        counts = self.counts
        first = (np.arange(len(self)) - np.repeat(self.ends - counts, counts)) * (
            1 if self.overlapping else self.ctx
        )
        windows = np.minimum(documents["size"] - first, self.ctx + 1 - self.bos_count)
        return np.where(documents["single"], documents["size"], windows)

    def span(self, number: int) -> tuple[int, int, bool]:
        """Return begin and end of a sample in the store, and whether it may begin at any token."""
        index = int(np.searchsorted(self.ends, number, side="right"))
        document = self.documents[index]
        begin = int(document["begin"])
        size = int(document["size"])
        if document["single"]:
            return begin, begin + size, self.store.marks is None
        first = (number - int(self.ends[index] - self.counts[index])) * (1 if self.overlapping else self.ctx)
        return begin + first, begin + min(size, first + self.ctx + 1 - self.bos_count), True

    def read_document(self, index: int) -> "Sample":
        """Read all tokens of a document as one sample."""
        begin, size = (int(self.documents[name][index]) for name in ("begin", "size"))
        return self.read(begin, begin + size, False)

    def read(self, begin: int, end: int, text: bool) -> "Sample":
        """Read the tokens and weights of a range."""
        tokens = self.store.tokens.read(begin, end)
        marks = self.store.marks
        if marks is None:
            weights = np.ones(len(tokens), np.float32)
        else:
            weights = marks.read(begin, end).astype(np.float32)
        return Sample(tokens, weights, text)

    def select(self, selection: np.ndarray) -> "Shard":
        """Return a shard of only the selected documents."""
        return replace(self, documents=self.documents[selection])

    def split_units(self) -> "Shard":
        """Cut text into the units that a validation split distributes.

        A unit is one row, or 16 where rows overlap. Other documents stay whole.
        """
        if not self.is_full_text:
            return self
        span = self.ctx * (16 if self.overlapping else 1)
        starts = [np.arange(0, max(size - 1 + self.bos_count, 0), span) for size in self.documents["size"]]
        pieces = np.repeat(self.documents, [len(start) for start in starts])
        first = np.concatenate(starts)
        pieces["begin"] += first
        pieces["size"] = np.minimum(pieces["size"] - first, span + 1 - self.bos_count)
        pieces["line"] = np.arange(len(pieces))
        return replace(self, documents=pieces)

    def locate(self, selection: np.ndarray) -> list[str]:
        """Return `file:line` of the selected documents."""
        files, lines = (self.documents[name][selection].tolist() for name in ("file", "line"))
        return [f"{self.sources[file].name}:{line}" for file, line in zip(files, lines, strict=True)]

    @property
    def is_truncated(self) -> np.ndarray:
        """True for each document that is longer than its one row and loses its end."""
        return (
            self.documents["single"] & self.is_used & (self.documents["size"] > self.ctx + 1 - self.bos_count)
        )

    @property
    def is_too_large(self) -> np.ndarray:
        """True for each document that was skipped because it takes too much time or memory."""
        return self.documents["first"] == TOO_LARGE

    @property
    def is_refused(self) -> np.ndarray:
        """True for each document of no known form, or that the chat template refused."""
        return self.documents["first"] == REFUSED

    @property
    def is_used(self) -> np.ndarray:
        """True for each document that has samples."""
        return self.counts > 0

    @property
    def is_untrained(self) -> np.ndarray:
        """True for each document that was read but has no trained token within a row."""
        return ~self.is_used & (self.documents["first"] > TOO_LARGE)


class Sample(NamedTuple):
    """The tokens of one sample, with the weight of each as a target."""

    tokens: np.ndarray
    weights: np.ndarray  # float32; weight of each token as a target
    text: bool  # True if it may begin at any token


class Dataset:
    """The samples of all shards under consecutive numbers."""

    def __init__(self, shards: Sequence[Shard], ctx: int, bos: int | None) -> None:
        self.shards = list(shards)
        self.ctx = ctx
        self.bos = bos
        self.ends = np.cumsum([len(shard) for shard in self.shards])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, number: int) -> Sample:
        shard, begin, end, text = self._locate_span(number)
        return shard.read(begin, end, text)

    @cached_property
    def sizes(self) -> np.ndarray:
        """The number of tokens in each sample."""
        return np.concatenate([shard.sizes for shard in self.shards])

    def first_answers(self, limit: int) -> Iterator[Sample]:
        """Yield the first `limit` prompts and chats of each shard."""
        for shard, end in zip(self.shards, self.ends.tolist(), strict=True):
            if shard.sources[0].kind == "lines":
                for index in np.flatnonzero(shard.documents["single"] & (shard.counts > 0))[:limit]:
                    yield self[end - len(shard) + int(shard.ends[index]) - 1]

    def _locate_span(self, number: int) -> tuple[Shard, int, int, bool]:
        shard, number = self.locate(number)
        return shard, *shard.span(number)

    def locate(self, number: int) -> tuple[Shard, int]:
        """Return the shard of a sample, and its number there."""
        index = int(np.searchsorted(self.ends, number, side="right"))
        return self.shards[index], number - (int(self.ends[index - 1]) if index else 0)

    @property
    def is_full_text(self) -> bool:
        """True if all rows are full except the last of each document."""
        return all(shard.is_full_text for shard in self.shards)

    @property
    def is_plain_text(self) -> bool:
        """True if all data is plain text."""
        return all(shard.sources[0].kind == "text" for shard in self.shards)

    @property
    def tokens(self) -> int:
        """The number of tokens in documents that are used."""
        return sum(int(shard.documents["size"][shard.is_used].sum()) for shard in self.shards)

    @property
    def truncated(self) -> list[str]:
        """The places of documents that are longer than a row and lose their end."""
        return [place for shard in self.shards for place in shard.locate(shard.is_truncated)]

    @property
    def skipped(self) -> list[str]:
        """The places of documents without a trained token within a row."""
        return [place for shard in self.shards for place in shard.locate(shard.is_untrained)]

    @property
    def too_large(self) -> list[str]:
        """The places of rows that were skipped because they take too much time or memory."""
        return [place for shard in self.shards for place in shard.locate(shard.is_too_large)]

    @property
    def refused(self) -> list[str]:
        """The places of rows of no known form, or that the chat template refused."""
        return [place for shard in self.shards for place in shard.locate(shard.is_refused)]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the samples and their order: a shuffle can only resume in the data that it began in."""
        digest = hashlib.sha256(
            repr((self.ctx, self.bos, [shard.store.identity for shard in self.shards])).encode()
        )
        for shard in self.shards:
            digest.update(shard.documents.tobytes())
        return digest.hexdigest()[:16]


class DatasetKind(NamedTuple):
    """The classes that turn documents into samples."""

    shard: type[Shard] = Shard
    dataset: type[Dataset] = Dataset
    compare: ComparedKind | None = None


PLAIN_KIND = DatasetKind()


def format_places(places: list[str]) -> str:
    """List places for a message: `data.jsonl:3, 8, other.jsonl:1 and 5 more`."""
    rest = len(places) - MAX_LISTED
    parts = list[str]()
    previous_file = ""
    for place in places[:MAX_LISTED]:
        file, _, number = place.rpartition(":")
        parts.append(number if file and file == previous_file else relative_path(place))
        previous_file = file
    return ", ".join(parts) + (f" and {rest:,} more" if rest > 0 else "")


def relative_path(path: str) -> str:
    """Return a path relative to the current folder if it is inside it."""
    with suppress(ValueError, OSError):
        return str(Path(path).relative_to(Path.cwd()))
    return path


# ---- opening ---------------------------------------------------------------


def open_dataset(
    data: Sequence[str],
    tokenizer: TokenizerLike,
    options: DataOptions,
    ctx: int,
    seed: int,
    kind: DatasetKind = PLAIN_KIND,
    use: Use = "train",
) -> tuple[Dataset, Dataset | None]:
    """Open the training dataset and, if there is one, the validation dataset."""
    files = find_data(data, options.mapping, use, options.raw)
    training_files = files.sources
    validation_files = [] if options.val_split else files.validation
    if options.val:
        validation_files = find_sources(options.val, options.mapping, "validate", options.raw)
    for line in files.messages:
        if files.validation and validation_files is files.validation:
            line += f"; validating with {describe_files(validation_files)}"
        log_line(line)
    check_disjoint(training_files, validation_files)
    encoder = Encoder(tokenizer, options, ctx, kind.compare)
    build = partial(build_dataset, ctx=ctx, bos=encoder.bos, kind=kind)
    shards = open_shards(training_files, encoder, kind)
    check_length(shards, ctx, encoder.bos)
    if options.val_split:
        train, validation = split_shards(shards, describe_shards(shards), options.val_split, seed)
        return build(train), build(validation)
    if not validation_files:
        return build(shards), None
    options = replace(options, overlapping_samples=False)  # validation scores each token once
    encoder = Encoder(tokenizer, options, ctx, kind.compare)
    return build(shards), build(open_shards(validation_files, encoder, kind))


def open_shards(sources: list[DataFile], encoder: Encoder, kind: DatasetKind) -> list[Shard]:
    """Encode files into shards.

    Small files of the same kind share a shard up to GROUP_BYTES, so that a changed file re-encodes only its
    own shard.
    """
    groups = list[list[DataFile]]()
    room = 0
    for source in sources:
        size = source.path.stat().st_size
        if not groups or groups[-1][0].kind != source.kind or size > room:
            groups.append([])
            room = GROUP_BYTES
        groups[-1].append(source)
        room -= size
    overlapping = encoder.options.overlapping_samples and not encoder.options.pattern
    stores = [encoder.encode_files(group) for group in groups]
    return [
        kind.shard(
            sources=group,
            store=store,
            documents=store.documents,
            ctx=encoder.ctx,
            bos_count=encoder.bos is not None,
            overlapping=overlapping and group[0].kind == "text",
        )
        for group, store in zip(groups, stores, strict=True)
    ]


def build_dataset(shards: list[Shard], ctx: int, bos: int | None, kind: DatasetKind) -> Dataset:
    """Build a dataset; raise DataError if it has nothing to train on."""
    dataset = kind.dataset(shards, ctx, bos)
    if not len(dataset):
        places = format_places(dataset.skipped + dataset.too_large + dataset.refused)
        raise DataError(
            f"{describe_shards(shards)}: no row has a token to train on within {ctx} tokens (got {places}); "
            "add answers to train on, or raise --ctx",
            code="nothing-to-train",
        )
    return dataset


def check_length(shards: list[Shard], ctx: int, bos: int | None) -> None:
    """Raise DataError if plain text is shorter than one row."""
    targets = sum(int(shard.documents["size"].sum()) for shard in shards) - (bos is None)
    if Dataset(shards, ctx, bos).is_full_text and targets < ctx:
        hint = f"use {format_flag('ctx')} {max(targets, 1)} or less, or add text"
        raise DataError(
            f"{describe_shards(shards)}: too short for a row of {ctx} tokens; {hint}", code="text-too-short"
        )


def describe_shards(shards: list[Shard]) -> str:
    """Name the files of some shards for a message."""
    return describe_files([source for shard in shards for source in shard.sources])


# ---- validation split ------------------------------------------------------------

SPLIT_KEY = 0x5911  # makes the shuffle of the split differ from those of the epochs


def split_shards(shards: list[Shard], name: str, share: float, seed: int) -> tuple[list[Shard], list[Shard]]:
    """Split documents into training and validation by a seed; documents of one line stay together."""
    pieces = [shard.split_units() for shard in shards]
    units = [np.unique(shard.documents[["file", "line"]], return_inverse=True)[1] for shard in pieces]
    starts = np.cumsum([0, *(int(unit.max()) + 1 if len(unit) else 0 for unit in units)])
    total = int(starts[-1])
    if total < 2:
        hint = f"add data, or give a validation file with {format_flag('val')}"
        raise DataError(f"{name}: one sample cannot be split in two; {hint}", code="too-few-samples")
    order = Permutation(total, seed, SPLIT_KEY)
    is_validation = np.zeros(total, bool)
    is_validation[[order[index] for index in range(min(max(1, round(share * total)), total - 1))]] = True
    selections = [is_validation[start + unit] for start, unit in zip(starts, units, strict=False)]
    train = [shard.select(~selection) for shard, selection in zip(pieces, selections, strict=True)]
    validation = [
        replace(shard.select(selection), overlapping=False)
        for shard, selection in zip(pieces, selections, strict=True)
    ]
    return train, validation
