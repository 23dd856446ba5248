"""Packs samples into rows of a fixed length, in training order.

A row holds one sample or several: packed (each attends to itself only, and its positions begin at 0) or
filled up with the next ones (as llama.cpp's trainer did: one continuous text). The rest of a row has weight
0, and each padding token attends to itself only.

The position in the data is (seed, epoch, position, row): rows from `position` on in the epoch's order, `row`
of which were already returned where one window of samples makes several rows. If rows end with an epoch, the
rest of the last batch is padding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llamatrain.data.options import DataOptions
from llamatrain.data.packing import PlannedRows, RowCursor, best_fit
from llamatrain.data.shuffle import Order, mix
from llamatrain.platform.terminal import progress_bar

if TYPE_CHECKING:
    from llamatrain.data.dataset import Dataset
    from llamatrain.data.preference_records import ComparedKind
    from llamatrain.data.prompt_records import Prompt

PACKING_WINDOW = 512  # samples packed together
MEASURED_TOKENS = 1 << 20  # tokens measured to see how full rows are
LENGTH_STEP = 32  # row lengths are multiples of it


class Segment(NamedTuple):
    """A run of tokens that attends to itself only."""

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


Row = list[Segment]


class CursorState(NamedTuple):
    """The position in the data, as a checkpoint keeps it."""

    seed: int
    epoch: int = 0
    position: int = 0
    row: int = 0
    fingerprint: str = ""
    taken: int = 0  # samples in those rows; derived from the other fields
    end: int = 0  # rows end before this epoch; 0: never


@dataclass(frozen=True)
class Batch:
    """Arrays of shape (rows, length) for one training step."""

    tokens: np.ndarray  # int32
    targets: np.ndarray  # int32: the next token
    weights: np.ndarray  # float32: 0 where nothing is trained; divide by the step's total
    positions: np.ndarray  # int32
    starts: np.ndarray  # int32: the first token of the row that each token attends to
    size: int  # tokens without padding
    samples: int = 0
    answers: "PreferenceBatch | None" = None
    empty: int = 0  # rows that are padding
    texts: "TextBatch | None" = None
    prompts: "Sequence[Prompt | None]" = ()  # whose answers are to be generated, one for each row; None: padding
    rollouts: "RolloutBatch | None" = None


@dataclass(frozen=True)
class PreferenceBatch:
    """Assigns each token of a batch to an answer.

    In pairs, the rejected answers are numbered after all chosen ones.
    """

    sequences: np.ndarray  # int32 (rows, length)
    chosen: np.ndarray  # bool (rows, length): the tokens of a chosen answer and of its prompt
    sides: np.ndarray  # float32: 1 per pair; 1 or -1 per labelled answer; 0: none
    others: "Batch | None" = None  # the same prompts with the answers of other prompts

    @property
    def count(self) -> int:
        """The number of pairs or labelled answers."""
        return int(np.count_nonzero(self.sides))

    @property
    def chosen_tokens(self) -> int:
        """The number of tokens in chosen answers and their prompts."""
        return int(np.count_nonzero(self.chosen))


@dataclass(frozen=True, kw_only=True)
class TextBatch:
    """The texts of a batch whose embeddings are compared: in each row a query, its positive and its negatives."""

    numbers: np.ndarray  # int32 (rows, length): the number within the row of each token's text
    firsts: np.ndarray  # int32 (rows, texts): the place in the row of each text's first token
    lasts: np.ndarray  # int32 (rows, texts)
    present: np.ndarray  # bool (rows, texts)
    gradients: np.ndarray | None = None  # float32 (rows, texts, width): of the step's loss, by embedding

    def take(self, rows: slice) -> "TextBatch":
        """Return some of the rows."""
        gradients = None if self.gradients is None else self.gradients[rows]
        arrays = {name: getattr(self, name)[rows] for name in ("numbers", "firsts", "lasts", "present")}
        return TextBatch(**arrays, gradients=gradients)


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """The generated answers of a batch, one in each row, with their rewards; the weights of their tokens are 1."""

    shares: np.ndarray  # float32 (rows, length): of each token in the loss of the step
    advantages: np.ndarray  # float32 (rows, length): of the answer that a token belongs to
    old_log_probs: np.ndarray  # float32 (rows, length): when the answers were generated; 0: not needed
    rewards: np.ndarray  # float64 (rows,); NaN: the row is padding
    sizes: np.ndarray  # int64 (rows,): tokens of the answers
    truncated: np.ndarray  # bool (rows,): an answer has no end


class StepTotals(NamedTuple):
    """Sums over all micro-batches of a step; each batch contributes a share."""

    weight: float = 1.0
    answers: float = 1.0  # or pairs
    chosen_tokens: float = 1.0  # tokens of chosen answers with their prompts


class PackingStats(NamedTuple):
    """The shares of the computed tokens that are not padding and that are trained."""

    used: float
    trained: float


def row_lengths(
    ctx: int,
    options: DataOptions,
    full: bool,
    plain: bool,
    compare: "ComparedKind | None" = None,
    texts: int = 2,
) -> tuple[int, ...]:
    """Return the possible lengths of a batch: one compiled program each.

    Full, packed and filled rows all have the length `ctx`. Rows of pairs have room for both answers, those of groups
    for all `texts`; a labelled answer has a row of its own.
    """
    if compare == "pairs":
        return row_lengths(2 * ctx, options, False, plain)
    if compare == "texts":
        return row_lengths(texts * ctx, options, False, False)
    if full or (options.packs(plain) and compare in (None, "judged texts")) or options.fill_with_next_samples:
        return (ctx,)
    quarters = (-(-ctx * part // (4 * LENGTH_STEP)) * LENGTH_STEP for part in (1, 2, 3))
    return tuple(sorted({length for length in quarters if length < ctx} | {ctx}))


def rows_by_length(
    segments: Sequence[Segment], count: int, lengths: Sequence[int]
) -> Iterator[tuple[list[int], list[Row], int]]:
    """Yield segments of similar lengths together: their numbers, `count` rows of one each, and the length of these.

    The last rows may be empty.
    """
    order = sorted(range(len(segments)), key=lambda number: len(segments[number].tokens))
    for first in range(0, len(order), count):
        numbers = order[first : first + count]
        rows: list[Row] = [[segments[number]] for number in numbers]
        longest = len(segments[numbers[-1]].tokens)
        length = next(length for length in lengths if length >= longest)
        yield numbers, rows + [[] for _ in range(count - len(numbers))], length


class Batches:
    """Yields batches of a dataset, epoch after epoch, and can resume at any row."""

    def __init__(
        self,
        dataset: "Dataset",
        options: DataOptions,
        seed: int,
        eos: int | None = None,
        bos: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.options = options
        self.ctx = dataset.ctx
        self.padding = next((token for token in (eos, bos) if token is not None), 0)
        separators = ((eos, options.separate_with_eos), (bos, options.separate_with_bos))
        self.separators = [token for token, wanted in separators if wanted and token is not None]
        self.eos = eos
        self.packs = options.packs(dataset.is_plain_text)
        self.seed = seed
        self.restore(CursorState(seed))

    @property
    def room(self) -> int:
        """The number of tokens in a row."""
        return self.ctx

    @property
    def lengths(self) -> tuple[int, ...]:
        """The possible lengths of a batch."""
        return row_lengths(self.room, self.options, self.dataset.is_full_text, self.dataset.is_plain_text)

    @property
    def has_untrained_tokens(self) -> bool:
        """True if many tokens are not trained."""
        return not self.dataset.is_full_text

    # ---- position in the data ----------------------------------------------

    @property
    def state(self) -> CursorState:
        """The position in the data, for a checkpoint."""
        epoch, position = divmod(self._cursor.index, len(self.dataset))
        return CursorState(
            self.seed,
            epoch,
            position,
            self._cursor.row,
            self.dataset.fingerprint,
            self._cursor.samples_passed,
            self.end,
        )

    def restore(self, state: CursorState) -> bool:
        """Continue at a saved position; return False if the data starts over.

        It starts over if the state belongs to other data or if a new shuffle was requested.
        """
        is_same_data = state.fingerprint in ("", self.dataset.fingerprint)
        reshuffles = bool(state.fingerprint) and self.options.force_reshuffle
        continues = is_same_data and not reshuffles
        if not continues:
            seed = self.seed
            if is_same_data:  # a new shuffle of the same data needs a new seed
                seed = mix(state.seed, state.epoch, state.position) >> 33
            state = CursorState(seed)
        self.seed = state.seed
        self.end = state.end
        self.order = Order(len(self.dataset), self.seed, self.options.shuffle)
        self._cursor = RowCursor(self._plan, state.epoch * len(self.dataset) + state.position, state.row)
        if self._cursor.is_invalid:  # a state that `state` never returned
            self.restore(CursorState(self.seed))
            return False
        return continues

    def batch(self, count: int) -> Batch:
        """Return the next `count` rows, padded after the last one."""
        rows = list[Row]()
        for _ in range(count):
            rows.append([] if self._has_ended else self._build_row(self._cursor.next_row()))
        return self.collate(rows)

    @property
    def _has_ended(self) -> bool:
        return 0 < self.end * len(self.dataset) <= self._cursor.index

    def skip(self, count: int) -> None:
        """Skip the next rows without reading their tokens."""
        for _ in range(count):
            if not self._has_ended:
                self._cursor.next_row()

    def count(self, epochs: int) -> int:
        """Count the rows of `epochs` epochs, including partly filled ones."""
        end = epochs * len(self.dataset)
        index = 0
        rows = 0
        if not (self.packs or self.options.fill_with_next_samples):
            return end
        with progress_bar("counting rows", total=end) as bar:
            while index < end:
                planned, index = self._plan(index)
                rows += len(planned)
                bar.update(index - bar.n)
        return rows

    def measure_packing(self, count: int) -> PackingStats:
        """Measure how full the first batches are: those of one window, or MEASURED_TOKENS."""
        rows = type(self)(self.dataset, self.options, self.seed, self.eos)
        samples = computed = used = trained = 0
        while samples < min(PACKING_WINDOW, len(self.dataset)) and computed < MEASURED_TOKENS:
            batch = rows.batch(count)
            samples += batch.samples
            computed += batch.tokens.size
            used += batch.size
            trained += int(np.count_nonzero(batch.weights))
        return PackingStats(used / computed, trained / computed)

    def one_epoch(self, count: int, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        """Yield all rows once, in the order of the files; padding fills the last batch.

        If several ranks share the batches in turn, yield only those of this rank, without reading the tokens
        of the others.
        """
        plain = DataOptions(shuffle=False, pack=self.packs)
        rows = type(self)(self.dataset, plain, self.seed, self.eos)
        rows.padding = self.padding
        for number, planned in enumerate(rows._cursor.rows_until(len(self.dataset), count)):
            if number % ranks == rank:
                yield self.collate([rows._build_row(row) for row in planned] + [[]] * (count - len(planned)))

    # ---- samples to rows ---------------------------------------------------

    def _plan(self, index: int) -> PlannedRows:
        """Return the rows that begin with the sample at an index, and the index after them."""
        if self.packs:
            end_of_epoch = (index // len(self.dataset) + 1) * len(self.dataset)
            window = range(index, min(index + PACKING_WINDOW, end_of_epoch))
            sizes = self._sizes_in_row(self.order.take(window))
            return best_fit(dict(zip(window, sizes, strict=True)), self.room), window.stop
        end = self._end_of_row(index) if self.options.fill_with_next_samples else index + 1
        return [range(index, end)], end

    def _build_row(self, indices: Sequence[int]) -> Row:
        if self.options.fill_with_next_samples and not self.packs:
            return [self._concatenate(indices)]
        return [segment for index in indices for segment in self._segments(index)]

    def _segments(self, index: int) -> Row:
        return [self._segment(*self._read_sample(index))]

    def _read_sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens and weights of a sample, after its begin token."""
        tokens, weights, text = self.dataset[self.order[index]]
        offset = self._offset(index, len(tokens), text)
        return self._with_bos(tokens[offset:], weights[offset:])

    def _offset(self, index: int, size: int, text: bool) -> int:
        """Return the number of tokens to skip at the start of a sample."""
        if not (self.options.sample_random_offsets and text):
            return 0
        return mix(self.seed, index, 1) % max(1, size - 1)

    def _with_bos(self, tokens: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self.dataset.bos is None:
            return tokens, weights
        return np.concatenate([[self.dataset.bos], tokens]), np.concatenate([[0], weights])

    def _segment(self, tokens: np.ndarray, weights: np.ndarray) -> Segment:
        end = self.ctx + 1
        return Segment(tokens[: end - 1][: len(tokens) - 1], tokens[1:end], weights[1:end])

    def _end_of_row(self, index: int) -> int:
        """Return the index after the samples that fill a row.

        A row takes one sample and, while there is room, separators and the next sample from its start.
        """
        begin, end, text = self._span(index)
        size = end - begin - self._offset(index, end - begin, text) + (self.dataset.bos is not None)
        while size <= self.ctx:
            separators = self._separators_after(index)
            index += 1
            begin, end, _ = self._span(index)
            size += len(separators) + end - begin
        return index + 1

    def _concatenate(self, indices: Sequence[int]) -> Segment:
        tokens, weights = self._read_sample(indices[0])
        for previous, index in pairwise(indices):
            separators = self._separators_after(previous)
            next_tokens, next_weights, text = self.dataset[self.order[index]]
            tokens = np.concatenate([tokens, separators, next_tokens])
            weights = np.concatenate([weights, np.full(len(separators), float(text)), next_weights])
        return self._segment(tokens, weights)

    def _separators_after(self, index: int) -> list[int]:
        """Return the separators after a sample; an end token is not repeated."""
        return [token for token in self.separators if token != self.eos or token != self._last_token(index)]

    def _last_token(self, index: int) -> int:
        end = self._span(index)[1]
        shard, _ = self.dataset.locate(self.order[index])
        return int(shard.store.tokens.read(end - 1, end)[0])

    def _span(self, index: int) -> tuple[int, int, bool]:
        """Return where the tokens of a sample are, and whether it is text that may begin anywhere."""
        shard, number = self.dataset.locate(self.order[index])
        return shard.span(number)

    def _sizes_in_row(self, numbers: np.ndarray) -> list[int]:
        """Return how many tokens of a row the samples take at most."""
        sizes = self.dataset.sizes[numbers] - 1 + (self.dataset.bos is not None)
        return list(np.minimum(sizes, self.ctx).tolist())

    # ---- rows to arrays ----------------------------------------------------

    def collate(self, rows: list[Row]) -> Batch:
        """Collate rows into a batch of the shortest possible length."""
        return self.to_arrays(rows, self.length_for(rows))

    def length_for(self, rows: list[Row]) -> int:
        """Return the shortest batch length that fits these rows."""
        longest = max(sum(len(segment.tokens) for segment in row) for row in rows)
        return next(length for length in self.lengths if length >= longest)

    def to_arrays(self, rows: list[Row], length: int) -> Batch:
        """Copy rows into arrays of a given length."""
        return collate_rows(rows, length, self.padding)


def collate_rows(rows: Sequence[Row], length: int, padding: int) -> Batch:
    """Copy rows into arrays of a given length, with `padding` behind them."""
    shape = (len(rows), length)
    tokens = np.full(shape, padding, np.int32)
    targets = np.full(shape, padding, np.int32)
    weights = np.zeros(shape, np.float32)
    positions = np.zeros(shape, np.int32)
    starts = np.zeros(shape, np.int32)
    for index, row in enumerate(rows):
        begin = 0
        for segment in row:
            end = begin + len(segment.tokens)
            tokens[index, begin:end], targets[index, begin:end], weights[index, begin:end] = segment
            positions[index, begin:end] = np.arange(end - begin)
            starts[index, begin:end] = begin
            begin = end
        starts[index, begin:] = np.arange(begin, length)
    return Batch(
        tokens=tokens,
        targets=targets,
        weights=weights,
        positions=positions,
        starts=starts,
        size=sum(len(segment.tokens) for row in rows for segment in row),
        samples=sum(map(len, rows)),
        empty=sum(not row for row in rows),
    )
