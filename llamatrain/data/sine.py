"""The built-in data: a sine wave as tokens, one per level, that a tiny model can learn in seconds.

Token 0 begins a row; token 1 is the lowest level and the last one the highest. A row is a wave with a period
of 16 tokens and a random phase. llama.cpp's baby-llama trained on the same wave.
"""

from collections.abc import Iterator

import numpy as np

from llamatrain.data.batches import Batch, CursorState, PackingStats
from llamatrain.data.shuffle import mix
from llamatrain.errors import UsageError

PERIOD = 16  # tokens
BEGIN = 0
FINGERPRINT = "sine"


class Sine:
    """Yields endless rows of the wave by seed and row number; an epoch is 1024 rows."""

    ROWS = 1024  # an epoch

    def __init__(self, levels: int, ctx: int, seed: int) -> None:
        if levels < 3:
            raise UsageError(
                "the sine wave needs a vocabulary of at least 3 tokens, a begin token and two levels "
                f"(got {levels})",
                code="vocabulary-too-small",
            )
        self.levels = levels
        self.ctx = ctx
        self.seed = seed
        self.lengths = (ctx,)
        self.has_untrained_tokens = False
        self._row = self.end = 0

    @property
    def state(self) -> CursorState:
        """The position in the data, for a checkpoint."""
        epoch, position = divmod(self._row, self.ROWS)
        return CursorState(
            seed=self.seed, epoch=epoch, position=position, fingerprint=FINGERPRINT, end=self.end
        )

    def restore(self, state: CursorState) -> bool:
        """Continue at a saved position; return False if it belongs to other data."""
        same = state.fingerprint in ("", FINGERPRINT)
        if same:
            self.seed = state.seed
            self.end = state.end
        self._row = state.epoch * self.ROWS + state.position if same else 0
        return same

    def count(self, epochs: int) -> int:
        """Count the rows of `epochs` epochs."""
        return epochs * self.ROWS

    def measure_packing(self, count: int) -> PackingStats:
        """Return the share of used tokens: all of them."""
        return PackingStats(1.0, 1.0)

    def batch(self, count: int) -> Batch:
        """Return the next `count` rows, padded after the last one."""
        phases = [2 * np.pi * mix(self.seed, self._row + row) / 2**64 for row in range(count)]
        rows_left = self._count_left(count)
        self._row += rows_left
        rows = np.stack(
            [np.concatenate([[BEGIN], self.to_tokens(phase, self.ctx)]) for phase in phases]
        ).astype(np.int32)
        positions = np.broadcast_to(np.arange(self.ctx, dtype=np.int32), (count, self.ctx))
        weights = np.ones((count, self.ctx), np.float32)
        weights[rows_left:] = 0
        return Batch(
            tokens=rows[:, :-1],
            targets=rows[:, 1:],
            weights=weights,
            positions=positions,
            starts=np.zeros_like(positions),
            size=rows_left * self.ctx,
            empty=count - rows_left,
        )

    def skip(self, count: int) -> None:
        """Skip the next rows."""
        self._row += self._count_left(count)

    def _count_left(self, count: int) -> int:
        """Return how many of the next `count` rows come before the end."""
        return min(count, max(0, self.end * self.ROWS - self._row)) if self.end else count

    def one_epoch(self, count: int, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        """Yield nothing: a wave is evaluated by generating it, not on held-out rows."""
        return iter(())

    # ---- levels ------------------------------------------------------------

    def to_tokens(self, phase: float, count: int) -> np.ndarray:
        """Return `count` steps of the wave; the first is one step after the phase."""
        height = np.sin(phase + 2 * np.pi / PERIOD * np.arange(1, count + 1))
        return 1 + np.minimum(((height + 1) / 2 * (self.levels - 1)).astype(np.int32), self.levels - 2)

    def to_heights(self, tokens: np.ndarray) -> np.ndarray:
        """Convert tokens to heights from -1 to 1.

        A token stands for the middle of its level; the begin token is the lowest.
        """
        return 2 * (np.maximum(np.asarray(tokens) - 1, 0) + 0.5) / (self.levels - 1) - 1
