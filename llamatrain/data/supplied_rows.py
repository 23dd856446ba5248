"""Rows of token ids that a Python program supplies, one row after the other, without an end.

A function of the row's number is called for each row; a sequence is repeated; another iterable is read once, and
must be long enough. A resumed run continues at the row where it was: of an iterable, earlier rows are skipped.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from llamatrain.config.messages import quote
from llamatrain.data.batches import Batch, CursorState, PackingStats, Segment, collate_rows
from llamatrain.errors import DataError, UsageError

RowSource = Callable[[int], Sequence[int]] | Iterable[Sequence[int]]  # row numbers count from 0
FINGERPRINT = "supplied rows"
MIN_TOKENS = 2  # one to read, and one to predict


def create_reader(source: RowSource) -> Callable[[int], Sequence[int]]:
    """Return a function of the row's number, which is called with increasing numbers."""
    if callable(source):
        return source
    if isinstance(source, str | bytes | Mapping) or not isinstance(source, Iterable):
        raise UsageError(
            f"rows must be a function of the row's number, or an iterable of lists of token ids (got {quote(source)})",
            code="invalid-rows",
        )
    if isinstance(source, Sequence | np.ndarray):
        if not len(source):
            raise UsageError("rows must not be empty", code="invalid-rows")
        return lambda number: source[number % len(source)]
    return IteratorReader(iter(source))


class IteratorReader:
    """A reader of an iterator, which can only go ahead."""

    def __init__(self, rows: Iterator[Sequence[int]]) -> None:
        self._rows, self._next = rows, 0

    def __call__(self, number: int) -> Sequence[int]:
        """Return a row, and skip those before it."""
        for row in self._rows:
            self._next += 1
            if self._next > number:
                return row
        raise DataError(
            f"rows: there are only {self._next:,}, and the run needs more; supply more rows, or run fewer steps",
            code="rows-ended",
        )


class SuppliedRows:
    """Batches of supplied rows."""

    has_untrained_tokens = False

    def __init__(self, source: RowSource, vocab: int, ctx: int, seed: int) -> None:
        self.read_row = create_reader(source)
        self.vocab, self.ctx, self.seed = vocab, ctx, seed
        self.lengths = (ctx,)
        self._row = self.end = 0

    @property
    def state(self) -> CursorState:
        """The position in the data, for a checkpoint."""
        return CursorState(seed=self.seed, position=self._row, fingerprint=FINGERPRINT)

    def restore(self, state: CursorState) -> bool:
        """Continue at a saved position; return False if it belongs to other data."""
        same = state.fingerprint in ("", FINGERPRINT)
        self._row = state.position if same else 0
        return same

    def count(self, epochs: int) -> int:
        """Raise an error: rows have no epochs."""
        raise UsageError("--epochs has no effect with rows=; give --iters", code="unused-option")

    def measure_packing(self, count: int) -> PackingStats:
        """Return the share of used tokens, without reading rows ahead."""
        return PackingStats(1.0, 1.0)

    def batch(self, count: int) -> Batch:
        """Return the next `count` rows."""
        rows = [[self._read_segment(self._row + number)] for number in range(count)]
        self._row += count
        return collate_rows(rows, self.ctx, padding=0)

    def skip(self, count: int) -> None:
        """Skip the next rows."""
        self._row += count

    def one_epoch(self, count: int, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        """Yield nothing: supplied rows are only trained."""
        return iter(())

    def _read_segment(self, number: int) -> Segment:
        row = self.read_row(number)
        try:
            tokens = np.asarray(row)
        except (TypeError, ValueError, OverflowError):
            tokens = np.asarray(None)
        if tokens.dtype.kind not in "iu" or tokens.ndim != 1:
            raise DataError(
                f"row {number} must be a list of token ids (got {quote(row)})", code="invalid-row"
            )
        if not MIN_TOKENS <= len(tokens) <= self.ctx + 1:
            raise DataError(
                f"row {number} must have {MIN_TOKENS} to {self.ctx + 1:,} tokens, one more than the context "
                f"(got {len(tokens):,})",
                code="invalid-row",
            )
        if not 0 <= tokens.min() <= tokens.max() < self.vocab:
            raise DataError(
                f"row {number}: token ids must be from 0 to {self.vocab - 1} (got {tokens.min()} to {tokens.max()})",
                code="invalid-row",
            )
        return Segment(tokens[:-1], tokens[1:], np.ones(len(tokens) - 1, np.float32))
