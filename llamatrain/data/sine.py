"""The built-in data: a sine wave as tokens, one level each, that a tiny model can learn in seconds.

Token 0 begins a row; token 1 is the lowest level and the last one the highest. A row is a wave of 16 tokens a period that
begins anywhere. After llama.cpp's baby-llama, which trained on the same wave.
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
    """Rows without end, by seed and number; an epoch is as many as differ to the eye."""

    ROWS = 1024  # an epoch

    def __init__(self, levels: int, ctx: int, seed: int) -> None:
        if levels < 3:
            raise UsageError(
                f"the sine wave takes a vocabulary of 3 or more (a begin token and two levels), not {levels}"
            )
        self.levels, self.ctx, self.seed = levels, ctx, seed
        self.lengths, self.sparse = (ctx,), False
        self._row = self.end = 0

    @property
    def state(self) -> CursorState:
        epoch, position = divmod(self._row, self.ROWS)
        return CursorState(
            seed=self.seed, epoch=epoch, position=position, fingerprint=FINGERPRINT, end=self.end
        )

    def restore(self, state: CursorState) -> bool:
        same = state.fingerprint in ("", FINGERPRINT)
        if same:
            self.seed, self.end = state.seed, state.end
        self._row = state.epoch * self.ROWS + state.position if same else 0
        return same

    def count(self, epochs: int) -> int:
        return epochs * self.ROWS

    def filling(self, count: int) -> PackingStats:
        return PackingStats(1.0, 1.0)

    def batch(self, count: int) -> Batch:
        phases = [2 * np.pi * mix(self.seed, self._row + row) / 2**64 for row in range(count)]
        there = self._left(count)
        self._row += there
        rows = np.stack([np.concatenate([[BEGIN], self.tokens(phase, self.ctx)]) for phase in phases]).astype(
            np.int32
        )
        positions = np.broadcast_to(np.arange(self.ctx, dtype=np.int32), (count, self.ctx))
        weights = np.ones((count, self.ctx), np.float32)
        weights[there:] = 0
        return Batch(
            tokens=rows[:, :-1],
            targets=rows[:, 1:],
            weights=weights,
            positions=positions,
            starts=np.zeros_like(positions),
            size=there * self.ctx,
            empty=count - there,
        )

    def skip(self, count: int) -> None:
        self._row += self._left(count)

    def _left(self, count: int) -> int:
        """Return how many of so many rows there are before the end."""
        return min(count, max(0, self.end * self.ROWS - self._row)) if self.end else count

    def once(self, count: int, mine: int = 0, of: int = 1) -> Iterator[Batch]:
        """A wave is judged by what it generates, not by rows that are kept apart."""
        return iter(())

    # ---- levels ------------------------------------------------------------

    def tokens(self, phase: float, count: int) -> np.ndarray:
        """So many steps of the wave, the first one a step behind the phase."""
        height = np.sin(phase + 2 * np.pi / PERIOD * np.arange(1, count + 1))
        return 1 + np.minimum(((height + 1) / 2 * (self.levels - 1)).astype(np.int32), self.levels - 2)

    def heights(self, tokens: np.ndarray) -> np.ndarray:
        """What the tokens stand for, -1 to 1, each level by its middle; the begin token is the lowest."""
        return 2 * (np.maximum(np.asarray(tokens) - 1, 0) + 0.5) / (self.levels - 1) - 1
