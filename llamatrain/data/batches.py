"""Packs samples into rows of a fixed length, in training order.

A row holds one sample or several: packed (each attends to itself only, and its positions begin at 0) or
filled up
with the next ones (as llama.cpp's trainer did: one continuous text). The rest of a row has weight 0, and each
padding
token attends to itself only.

The position in the data is (seed, epoch, position, row): rows from `position` on in the epoch's order, `row`
of which
were already returned where one window of samples makes several rows. If rows end with an epoch, the rest of
the
last batch is padding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llamatrain.data.options import DataOptions
from llamatrain.data.packing import Planned, RowCursor, best_fit
from llamatrain.data.shuffle import Order, mix
from llamatrain.platform.terminal import progress_bar

if TYPE_CHECKING:
    from llamatrain.data.dataset import Dataset
    from llamatrain.data.preference_records import Compare

WINDOW = 512  # samples that are packed together
ENOUGH = 1 << 20  # tokens, to see how full rows are
GRAIN = 32  # lengths of rows are multiples of it


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
    taken: int = 0  # samples from `position` on, in those rows; it follows from the others
    end: int = 0  # rows end before this epoch; 0: never


@dataclass(frozen=True)
class Batch:
    """Arrays of shape (rows, length) for one training step."""

    tokens: np.ndarray  # int32
    targets: np.ndarray  # int32: the next token
    weights: np.ndarray  # float32: 0 where nothing is trained; to be divided by the step's total
    positions: np.ndarray  # int32
    starts: np.ndarray  # int32: the first token of the row that each may see
    size: int  # tokens without padding
    samples: int = 0
    compared: "PreferenceBatch | None" = None
    empty: int = 0  # rows that are padding


@dataclass(frozen=True)
class PreferenceBatch:
    """Assigns each token of a batch to an answer.

    In pairs, the rejected answers are numbered after all chosen ones.
    """

    sequences: np.ndarray  # int32 (rows, length)
    chosen: np.ndarray  # bool (rows, length): the tokens of a chosen answer and of its prompt
    sides: (
        np.ndarray
    )  # float32: 1 for each pair; of answers that are judged one by one 1 or -1; 0: there is none
    others: "Batch | None" = None  # the same prompts with answers to others

    @property
    def count(self) -> int:
        """The number of pairs or labelled answers."""
        return int(np.count_nonzero(self.sides))

    @property
    def words(self) -> int:
        """The number of tokens in chosen answers and their prompts."""
        return int(np.count_nonzero(self.chosen))


class PackingStats(NamedTuple):
    """The shares of the computed tokens that are not padding and that are trained."""

    used: float
    trained: float


def lengths_of(
    ctx: int, options: DataOptions, full: bool, plain: bool, compare: "Compare | None" = None
) -> tuple[int, ...]:
    """Return the possible lengths of a batch: one compiled program each.

    Full, packed and filled rows all have the length `ctx`. Rows of pairs have room for both answers; a
    labelled answer
    has a row of its own.
    """
    if compare == "pairs":
        return lengths_of(2 * ctx, options, False, plain)
    if full or (options.packs(plain) and not compare) or options.fill_with_next_samples:
        return (ctx,)
    quarters = (-(-ctx * part // (4 * GRAIN)) * GRAIN for part in (1, 2, 3))
    return tuple(sorted({length for length in quarters if length < ctx} | {ctx}))


class Batches:
    """Yields batches of a dataset, epoch after epoch, and can resume at any row."""

    def __init__(
        self,
        corpus: "Dataset",
        options: DataOptions,
        seed: int,
        eos: int | None = None,
        bos: int | None = None,
    ) -> None:
        self.corpus, self.options, self.ctx = corpus, options, corpus.ctx
        self.padding = next((token for token in (eos, bos) if token is not None), 0)
        between = ((eos, options.separate_with_eos), (bos, options.separate_with_bos))
        self.separators = [token for token, wanted in between if wanted and token is not None]
        self.eos = eos
        self.packs = options.packs(corpus.plain)
        self.seed = seed
        self.restore(CursorState(seed))

    @property
    def room(self) -> int:
        """The number of tokens in a row."""
        return self.ctx

    @property
    def lengths(self) -> tuple[int, ...]:
        """The possible lengths of a batch."""
        return lengths_of(self.room, self.options, self.corpus.only_text, self.corpus.plain)

    @property
    def sparse(self) -> bool:
        """True if many tokens are not trained."""
        return not self.corpus.only_text

    # ---- where training stands ---------------------------------------------

    @property
    def state(self) -> CursorState:
        """The position in the data, for a checkpoint."""
        epoch, position = divmod(self._walk.place, len(self.corpus))
        return CursorState(
            self.seed, epoch, position, self._walk.row, self.corpus.fingerprint, self._walk.taken, self.end
        )

    def restore(self, state: CursorState) -> bool:
        """Continue at a saved position; return False if the data starts over.

        It starts over if the state belongs to other data or if a new shuffle was requested.
        """
        same = state.fingerprint in ("", self.corpus.fingerprint) and not (
            state.fingerprint and self.options.force_reshuffle
        )
        if not same:
            forced = state.fingerprint == self.corpus.fingerprint  # then the new shuffle is another one
            state = CursorState(mix(state.seed, state.epoch, state.position) >> 33 if forced else self.seed)
        self.seed, self.end = state.seed, state.end
        self.order = Order(len(self.corpus), self.seed, self.options.shuffle)
        self._walk = RowCursor(self._plan, state.epoch * len(self.corpus) + state.position, state.row)
        if self._walk.lost:  # a state that was never given out
            return self.restore(CursorState(self.seed)) and False
        return same

    def batch(self, count: int) -> Batch:
        """Return the next `count` rows, padded after the last one."""
        return self.lay([[] if self._ended else self._made(self._walk.next()) for _ in range(count)])

    @property
    def _ended(self) -> bool:
        return 0 < self.end * len(self.corpus) <= self._walk.place

    def skip(self, count: int) -> None:
        """Skip the next rows without reading their tokens."""
        for _ in range(count):
            if not self._ended:
                self._walk.next()

    def count(self, epochs: int) -> int:
        """Count the rows of `epochs` epochs, including partly filled ones."""
        end, place, rows = epochs * len(self.corpus), 0, 0
        if not (self.packs or self.options.fill_with_next_samples):
            return end
        with progress_bar("counting rows", total=end) as told:
            while place < end:
                planned, place = self._plan(place)
                rows += len(planned)
                told.update(place - told.n)
        return rows

    def filling(self, count: int) -> PackingStats:
        """Measure how full the first batches are: those of one window, or of ENOUGH tokens."""
        rows = type(self)(self.corpus, self.options, self.seed, self.eos)
        samples = computed = used = trained = 0
        while samples < min(WINDOW, len(self.corpus)) and computed < ENOUGH:
            batch = rows.batch(count)
            samples, computed, used = samples + batch.samples, computed + batch.tokens.size, used + batch.size
            trained += int(np.count_nonzero(batch.weights))
        return PackingStats(used / computed, trained / computed)

    def once(self, count: int, mine: int = 0, of: int = 1) -> Iterator[Batch]:
        """Yield all rows once, in the order of the files; padding fills the last batch.

        If `of` ranks share the batches in turn, yield only those of rank `mine`, without reading the tokens
        of the others.
        """
        plain = DataOptions(shuffle=False, pack=self.packs)
        rows = type(self)(self.corpus, plain, self.seed, self.eos)
        rows.padding = self.padding
        for number, planned in enumerate(rows._walk.until(len(self.corpus), count)):
            if number % of == mine:
                yield self.lay([rows._made(each) for each in planned] + [[]] * (count - len(planned)))

    # ---- samples to rows ---------------------------------------------------

    def _plan(self, place: int) -> Planned:
        """Return the rows that begin with the sample at an index, and the index after them."""
        if self.packs:
            window = range(place, min(place + WINDOW, (place // len(self.corpus) + 1) * len(self.corpus)))
            return best_fit(
                dict(zip(window, self._lengths(self.order.among(window)), strict=True)), self.room
            ), window.stop
        end = self._filled(place) if self.options.fill_with_next_samples else place + 1
        return [range(place, end)], end

    def _made(self, places: Sequence[int]) -> Row:
        if self.options.fill_with_next_samples and not self.packs:
            return [self._joined(places)]
        return [piece for place in places for piece in self._pieces(place)]

    def _pieces(self, place: int) -> Row:
        return [self._piece(*self._sample(place))]

    def _sample(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens and weights of a sample, after its begin token."""
        tokens, weights, text = self.corpus[self.order[place]]
        offset = self._offset(place, len(tokens), text)
        return self._led(tokens[offset:], weights[offset:])

    def _offset(self, place: int, size: int, text: bool) -> int:
        """Return the number of tokens to skip at the start of a sample."""
        if not (self.options.sample_random_offsets and text):
            return 0
        return mix(self.seed, place, 1) % max(1, size - 1)

    def _led(self, tokens: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self.corpus.lead is None:
            return tokens, weights
        return np.concatenate([[self.corpus.lead], tokens]), np.concatenate([[0], weights])

    def _piece(self, tokens: np.ndarray, weights: np.ndarray) -> Segment:
        end = self.ctx + 1
        return Segment(tokens[: end - 1][: len(tokens) - 1], tokens[1:end], weights[1:end])

    def _filled(self, place: int) -> int:
        """Return the index after the samples that fill a row.

        A row takes one sample and, while there is room, separators and the next sample from its start.
        """
        begin, end, text = self._span(place)
        size = end - begin - self._offset(place, end - begin, text) + (self.corpus.lead is not None)
        while size <= self.ctx:
            between = self._between(place)
            place += 1
            begin, end, _ = self._span(place)
            size += len(between) + end - begin
        return place + 1

    def _joined(self, places: Sequence[int]) -> Segment:
        tokens, weights = self._sample(places[0])
        for before, place in pairwise(places):
            between = self._between(before)
            following, theirs, text = self.corpus[self.order[place]]
            tokens = np.concatenate([tokens, between, following])
            weights = np.concatenate([weights, np.full(len(between), float(text)), theirs])
        return self._piece(tokens, weights)

    def _between(self, place: int) -> list[int]:
        """Return the separators after a sample; an end token is not repeated."""
        return [token for token in self.separators if token != self.eos or token != self._last(place)]

    def _last(self, place: int) -> int:
        end = self._span(place)[1]
        part, _ = self.corpus.part_of(self.order[place])
        return int(part.store.tokens.read(end - 1, end)[0])

    def _span(self, place: int) -> tuple[int, int, bool]:
        """Return where the tokens of a sample are, and whether it is text that may begin anywhere."""
        part, number = self.corpus.part_of(self.order[place])
        return part.span(number)

    def _lengths(self, numbers: np.ndarray) -> list[int]:
        """Return how many tokens of a row the samples take at most."""
        sizes = self.corpus.sizes[numbers] - 1 + (self.corpus.lead is not None)
        return list(np.minimum(sizes, self.ctx).tolist())

    # ---- rows to arrays ----------------------------------------------------

    def lay(self, rows: list[Row]) -> Batch:
        """Collate rows into a batch of the shortest possible length."""
        return self.laid(rows, self.length_for(rows))

    def length_for(self, rows: list[Row]) -> int:
        """Return the shortest batch length that fits these rows."""
        most = max(sum(len(piece.tokens) for piece in row) for row in rows)
        return next(length for length in self.lengths if length >= most)

    def laid(self, rows: list[Row], length: int) -> Batch:
        """Copy rows into arrays of a given length."""
        shape = (len(rows), length)
        tokens, targets = np.full(shape, self.padding, np.int32), np.full(shape, self.padding, np.int32)
        weights, positions, starts = (
            np.zeros(shape, np.float32),
            np.zeros(shape, np.int32),
            np.zeros(shape, np.int32),
        )
        for number, row in enumerate(rows):
            at = 0
            for piece in row:
                end = at + len(piece.tokens)
                tokens[number, at:end], targets[number, at:end], weights[number, at:end] = piece
                positions[number, at:end] = np.arange(end - at)
                starts[number, at:end] = at
                at = end
            starts[number, at:] = np.arange(at, length)
        return Batch(
            tokens=tokens,
            targets=targets,
            weights=weights,
            positions=positions,
            starts=starts,
            size=sum(len(piece.tokens) for row in rows for piece in row),
            samples=sum(map(len, rows)),
            empty=sum(not row for row in rows),
        )
