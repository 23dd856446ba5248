"""The order of samples: a permutation that is computed, not stored.

A Feistel network over the smallest even number of bits that holds all indices, walked until the result is one of them
(Black and Rogaway 2002). Where training stands is three numbers, resuming costs nothing, and nothing grows with the data.
"""

import numpy as np

MASK = (1 << 64) - 1
FIRST, STRIDE, LAST = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
ROUNDS = 8


def mix(*words: int) -> int:
    """64 well-mixed bits of some numbers (the finaliser of splitmix64, chained)."""
    state = FIRST
    for word in words:
        state = (state + word * STRIDE + FIRST) & MASK
        state = ((state ^ (state >> 30)) * STRIDE) & MASK
        state = ((state ^ (state >> 27)) * LAST) & MASK
        state ^= state >> 31
    return state


def mixed(words: np.ndarray) -> np.ndarray:
    """`mix` of each of some numbers alone."""
    state = np.uint64(FIRST) + words * np.uint64(STRIDE) + np.uint64(FIRST)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(STRIDE)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(LAST)
    return state ^ (state >> np.uint64(31))


class Permutation:
    """The numbers 0 to count - 1 in an order that a key chooses."""

    def __init__(self, count: int, *key: int) -> None:
        self.count = count
        self.half = max(1, ((count - 1).bit_length() + 1) // 2)
        self.keys = [mix(*key, number) for number in range(ROUNDS)]

    def __getitem__(self, index: int) -> int:
        low = (1 << self.half) - 1
        while True:
            left, right = index >> self.half, index & low
            for key in self.keys:
                left, right = right, left ^ (mix(right ^ key) & low)
            index = left << self.half | right
            if index < self.count:
                return index

    def among(self, indices: range) -> np.ndarray:
        """The numbers at some indices, together."""
        half, low = np.uint64(self.half), np.uint64((1 << self.half) - 1)
        found = np.arange(indices.start, indices.stop, dtype=np.uint64)
        left = np.ones(len(found), bool)
        while left.any():
            high, rest = found[left] >> half, found[left] & low
            for key in self.keys:
                high, rest = rest, high ^ (mixed(rest ^ np.uint64(key)) & low)
            found[left] = high << half | rest
            left = found >= self.count
        return found.astype(np.int64)


class Order:
    """An endless line of sample numbers: epoch after epoch, each shuffled by seed and epoch."""

    def __init__(self, count: int, seed: int, shuffle: bool = True) -> None:
        self.count, self.seed, self.shuffle = count, seed, shuffle
        self._epoch, self._permutation = -1, Permutation(count)

    def __getitem__(self, place: int) -> int:
        epoch, position = divmod(place, self.count)
        if not self.shuffle:
            return position
        return self._of(epoch)[position]

    def _of(self, epoch: int) -> Permutation:
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, Permutation(self.count, self.seed, epoch)
        return self._permutation

    def among(self, places: range) -> np.ndarray:
        """The numbers at some places of one epoch."""
        position = places.start % self.count
        if not self.shuffle:
            return np.arange(position, position + len(places))
        return self._of(places.start // self.count).among(range(position, position + len(places)))
