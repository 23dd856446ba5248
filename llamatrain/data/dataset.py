"""Numbers the samples of all files, with their positions, lengths and trained tokens."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llamatrain.config.options import flag_of
from llamatrain.data.chat.prompt import TokenizerLike
from llamatrain.data.encode import REFUSED, TOO_MUCH, Encoder
from llamatrain.data.files import DataFile
from llamatrain.data.find_files import Use, check_disjoint, describe_files, find_data, find_sources
from llamatrain.data.options import DataOptions
from llamatrain.data.preference_records import Compare
from llamatrain.data.shuffle import Permutation
from llamatrain.data.token_cache import TokenStore
from llamatrain.errors import DataError
from llamatrain.platform.terminal import log_line

NAMED = 3  # places that a summary names before it says how many more there are
GROUP = 64 * 10**6  # bytes of small files that share an entry of the cache


@dataclass(frozen=True)
class Shard:
    """The documents of some files.

    A row takes `ctx` targets of a document; `lead` is 1 if a begin token precedes each row.
    """

    sources: list[DataFile]
    store: TokenStore
    documents: np.ndarray  # of cache.DOCUMENT
    ctx: int
    lead: int
    overlapping: bool

    @property
    def only_text(self) -> bool:
        """True if all rows are full except the last of each document."""
        return self.sources[0].kind == "text" and not self.documents["single"].any()

    @cached_property
    def counts(self) -> np.ndarray:
        """The number of samples in each document, as the dataset numbers them."""
        return self.within

    @cached_property
    def within(self) -> np.ndarray:
        """The number of samples in each document; 0 if no trained token is within reach."""
        size, first = self.documents["size"], self.documents["first"]
        targets = size - 1 + self.lead
        windows = np.maximum(size - self.ctx, 1) if self.overlapping else -(-targets // self.ctx)
        reached = (first >= 0) & (first <= self.ctx - self.lead) & (targets > 0)
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
        documents, counts = np.repeat(self.documents, self.counts), self.counts
        first = (np.arange(len(self)) - np.repeat(self.ends - counts, counts)) * (
            1 if self.overlapping else self.ctx
        )
        windows = np.minimum(documents["size"] - first, self.ctx + 1 - self.lead)
        return np.where(documents["single"], documents["size"], windows)

    def span(self, number: int) -> tuple[int, int, bool]:
        """Return the begin and end of a sample in the store, and whether it is text that may begin anywhere."""
        place = int(np.searchsorted(self.ends, number, side="right"))
        document = self.documents[place]
        begin, size = int(document["begin"]), int(document["size"])
        if document["single"]:
            return begin, begin + size, self.store.marks is None
        first = (number - int(self.ends[place] - self.counts[place])) * (1 if self.overlapping else self.ctx)
        return begin + first, begin + min(size, first + self.ctx + 1 - self.lead), True

    def whole(self, place: int) -> "Sample":
        """Read all tokens of a document as one sample."""
        begin, size = (int(self.documents[name][place]) for name in ("begin", "size"))
        return self.sample(begin, begin + size, False)

    def sample(self, begin: int, end: int, text: bool) -> "Sample":
        """Read the tokens and weights of a range."""
        tokens, marks = self.store.tokens.read(begin, end), self.store.marks
        weights = (
            np.ones(len(tokens), np.float32) if marks is None else marks.read(begin, end).astype(np.float32)
        )
        return Sample(tokens, weights, text)

    def take(self, chosen: np.ndarray) -> "Shard":
        """Return a shard of only the selected documents."""
        return replace(self, documents=self.documents[chosen])

    def dealt(self) -> "Shard":
        """Cut text into the units that a validation split distributes.

        A unit is one row, or 16 where rows overlap. Other documents stay whole.
        """
        if not self.only_text:
            return self
        span = self.ctx * (16 if self.overlapping else 1)
        starts = [np.arange(0, max(size - 1 + self.lead, 0), span) for size in self.documents["size"]]
        pieces = np.repeat(self.documents, [len(start) for start in starts])
        first = np.concatenate(starts)
        pieces["begin"] += first
        pieces["size"] = np.minimum(pieces["size"] - first, span + 1 - self.lead)
        pieces["line"] = np.arange(len(pieces))
        return replace(self, documents=pieces)

    def places(self, chosen: np.ndarray) -> list[str]:
        """Return `file:line` of the selected documents."""
        files, lines = (self.documents[name][chosen].tolist() for name in ("file", "line"))
        return [f"{self.sources[file].name}:{line}" for file, line in zip(files, lines, strict=True)]

    @property
    def long(self) -> np.ndarray:
        """Marks documents that are longer than their one row and lose their end."""
        return self.documents["single"] & self.used & (self.documents["size"] > self.ctx + 1 - self.lead)

    @property
    def excessive(self) -> np.ndarray:
        """Marks documents that were skipped because they take too much time or memory."""
        return self.documents["first"] == TOO_MUCH

    @property
    def refused(self) -> np.ndarray:
        """Marks documents of no known form, or that the chat template refused."""
        return self.documents["first"] == REFUSED

    @property
    def used(self) -> np.ndarray:
        """Marks documents that have samples."""
        return self.counts > 0

    @property
    def unused(self) -> np.ndarray:
        """Marks documents that were read but have no trained token within a row."""
        return ~self.used & (self.documents["first"] > TOO_MUCH)


class Sample(NamedTuple):
    """The tokens of one sample, with the weight of each as a target."""

    tokens: np.ndarray
    weights: np.ndarray  # float32; of each token as a target
    text: bool  # may begin anywhere


class Dataset:
    """The samples of all shards under consecutive numbers."""

    def __init__(self, parts: Sequence[Shard], ctx: int, lead: int | None) -> None:
        self.parts, self.ctx, self.lead = list(parts), ctx, lead
        self.ends = np.cumsum([len(part) for part in self.parts])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, number: int) -> Sample:
        part, begin, end, text = self._find(number)
        return part.sample(begin, end, text)

    @cached_property
    def sizes(self) -> np.ndarray:
        """The number of tokens in each sample."""
        return np.concatenate([part.sizes for part in self.parts])

    def answers(self, most: int) -> Iterator[Sample]:
        """Yield the first `most` prompts and chats of each shard."""
        for part, end in zip(self.parts, self.ends.tolist(), strict=True):
            if part.sources[0].kind == "lines":
                for place in np.flatnonzero(part.documents["single"] & (part.counts > 0))[:most]:
                    yield self[end - len(part) + int(part.ends[place]) - 1]

    def _find(self, number: int) -> tuple[Shard, int, int, bool]:
        part, number = self.part_of(number)
        return part, *part.span(number)

    def part_of(self, number: int) -> tuple[Shard, int]:
        """Return the shard of a sample, and its number there."""
        place = int(np.searchsorted(self.ends, number, side="right"))
        return self.parts[place], number - (int(self.ends[place - 1]) if place else 0)

    @property
    def only_text(self) -> bool:
        """True if all rows are full except the last of each document."""
        return all(part.only_text for part in self.parts)

    @property
    def plain(self) -> bool:
        """True if all data is plain text."""
        return all(part.sources[0].kind == "text" for part in self.parts)

    @property
    def tokens(self) -> int:
        """The number of tokens in documents that are used."""
        return sum(int(part.documents["size"][part.used].sum()) for part in self.parts)

    @property
    def cut(self) -> list[str]:
        """The places of documents that are longer than a row and lose their end."""
        return [place for part in self.parts for place in part.places(part.long)]

    @property
    def skipped(self) -> list[str]:
        """The places of documents without a trained token within a row."""
        return [place for part in self.parts for place in part.places(part.unused)]

    @property
    def excessive(self) -> list[str]:
        """The places of rows that were skipped because they take too much time or memory."""
        return [place for part in self.parts for place in part.places(part.excessive)]

    @property
    def refused(self) -> list[str]:
        """The places of rows of no known form, or that the chat template refused."""
        return [place for part in self.parts for place in part.places(part.refused)]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the samples and their order: a shuffle can only resume in the data that it began in."""
        made = hashlib.sha256(
            repr((self.ctx, self.lead, [part.store.identity for part in self.parts])).encode()
        )
        for part in self.parts:
            made.update(part.documents.tobytes())
        return made.hexdigest()[:16]


class DatasetKind(NamedTuple):
    """The classes that turn documents into samples."""

    part: type[Shard] = Shard
    corpus: type[Dataset] = Dataset
    compare: Compare | None = None


PLAIN = DatasetKind()


def named(places: list[str]) -> str:
    """List places for a message: `data.jsonl:3, 8, other.jsonl:1 and 5 more`."""
    more, told, before = len(places) - NAMED, list[str](), ""
    for place in places[:NAMED]:
        file, _, number = place.rpartition(":")
        told.append(number if file and file == before else from_here(place))
        before = file
    return ", ".join(told) + (f" and {more:,} more" if more > 0 else "")


def from_here(path: str) -> str:
    """Return a path relative to the current folder if it is inside it."""
    with suppress(ValueError, OSError):
        return str(Path(path).relative_to(Path.cwd()))
    return path


# ---- opening ---------------------------------------------------------------


def open_corpus(
    data: Sequence[str],
    tokenizer: TokenizerLike,
    options: DataOptions,
    ctx: int,
    seed: int,
    kind: DatasetKind = PLAIN,
    use: Use = "train",
) -> tuple[Dataset, Dataset | None]:
    """Open the training dataset and, if there is one, the validation dataset."""
    found = find_data(data, options.mapping, use, options.raw)
    sources, others = found.sources, [] if options.val_split else found.validation
    if options.val:
        others = find_sources(options.val, options.mapping, "validate", options.raw)
    for line in found.messages:
        log_line(
            line
            if not found.validation or others is not found.validation
            else f"{line}; validated with: {describe_files(others)}"
        )
    check_disjoint(sources, others)
    encoder = Encoder(tokenizer, options, ctx, kind.compare)
    whole = partial(corpus_of, ctx=ctx, lead=encoder.lead, kind=kind)
    parts = open_parts(sources, encoder, kind)
    check_length(parts, ctx, encoder.lead)
    if options.val_split:
        train, validation = split(parts, name_of(parts), options.val_split, seed)
        return whole(train), whole(validation)
    plain = Encoder(
        tokenizer, replace(options, overlapping_samples=False), ctx, kind.compare
    )  # each token is judged once
    return whole(parts), whole(open_parts(others, plain, kind)) if others else None


def open_parts(sources: list[DataFile], encoder: Encoder, kind: DatasetKind) -> list[Shard]:
    """Encode files into shards.

    Small files of the same kind share a shard up to GROUP bytes, so that a changed file re-encodes only its
    own shard.
    """
    groups = list[list[DataFile]]()
    room = 0
    for source in sources:
        size = source.path.stat().st_size
        if not groups or groups[-1][0].kind != source.kind or size > room:
            groups.append([])
            room = GROUP
        groups[-1].append(source)
        room -= size
    overlapping = encoder.options.overlapping_samples and not encoder.options.pattern
    stores = [encoder.store(group) for group in groups]
    return [
        kind.part(
            sources=group,
            store=store,
            documents=store.documents,
            ctx=encoder.ctx,
            lead=encoder.lead is not None,
            overlapping=overlapping and group[0].kind == "text",
        )
        for group, store in zip(groups, stores, strict=True)
    ]


def corpus_of(parts: list[Shard], ctx: int, lead: int | None, kind: DatasetKind) -> Dataset:
    """Build a dataset; raise DataError if it has nothing to train on."""
    corpus = kind.corpus(parts, ctx, lead)
    if not len(corpus):
        without = named(corpus.skipped + corpus.excessive + corpus.refused)
        raise DataError(f"{name_of(parts)}: no row has a token to train on within {ctx} tokens: {without}")
    return corpus


def check_length(parts: list[Shard], ctx: int, lead: int | None) -> None:
    """Raise DataError if plain text is shorter than one row."""
    targets = sum(int(part.documents["size"].sum()) for part in parts) - (lead is None)
    if Dataset(parts, ctx, lead).only_text and targets < ctx:
        less = f"take {flag_of('ctx')} {max(targets, 1)} or less, or more text"
        raise DataError(f"{name_of(parts)}: too short for a row of {ctx}; {less}")


def name_of(parts: list[Shard]) -> str:
    """Name the files of some shards for a message."""
    return describe_files([source for part in parts for source in part.sources])


# ---- validation split ------------------------------------------------------------

SPLIT = 0x5911  # makes the shuffle of the split differ from those of the epochs


def split(parts: list[Shard], name: str, share: float, seed: int) -> tuple[list[Shard], list[Shard]]:
    """Split documents into training and validation by a seed; documents of one line stay together."""
    pieces = [part.dealt() for part in parts]
    units = [np.unique(part.documents[["file", "line"]], return_inverse=True)[1] for part in pieces]
    starts = np.cumsum([0, *(int(unit.max()) + 1 if len(unit) else 0 for unit in units)])
    total = int(starts[-1])
    if total < 2:
        more = f"give more data, or a file with {flag_of('val')}"
        raise DataError(f"{name}: one sample cannot be split in two; {more}")
    dealt = Permutation(total, seed, SPLIT)
    kept = np.zeros(total, bool)
    kept[[dealt[place] for place in range(min(max(1, round(share * total)), total - 1))]] = True
    chosen = [kept[start + unit] for start, unit in zip(starts, units, strict=False)]
    train = [part.take(~held) for part, held in zip(pieces, chosen, strict=True)]
    validation = [
        replace(part.take(held), overlapping=False) for part, held in zip(pieces, chosen, strict=True)
    ]
    return train, validation
