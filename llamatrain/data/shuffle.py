"""Shuffles samples by a permutation that is computed, not stored.

It is a Feistel network over the smallest even number of bits that holds all indices, iterated until the
result is one of them (Black and Rogaway 2002). The position in the data is three numbers, resuming is free,
and no memory grows with the data.
"""

import numpy as np

MASK = (1 << 64) - 1
FIRST = 0x9E3779B97F4A7C15
STRIDE = 0xBF58476D1CE4E5B9
LAST = 0x94D049BB133111EB
ROUNDS = 8


def mix(*words: int) -> int:
    """Hash numbers into 64 well-mixed bits (the finalizer of splitmix64, chained)."""
    state = FIRST
    for word in words:
        state = (state + word * STRIDE + FIRST) & MASK
        state = ((state ^ (state >> 30)) * STRIDE) & MASK
        state = ((state ^ (state >> 27)) * LAST) & MASK
        state ^= state >> 31
    return state


def mix_array(numbers: np.ndarray) -> np.ndarray:
    """Apply `mix` to each number of an array."""
    state = np.uint64(FIRST) + numbers * np.uint64(STRIDE) + np.uint64(FIRST)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(STRIDE)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(LAST)
    return state ^ (state >> np.uint64(31))


class Permutation:
    """The numbers 0 to count - 1 in an order that depends on a key."""

    def __init__(self, count: int, *key: int) -> None:
        self.count = count
        self.half = max(1, ((count - 1).bit_length() + 1) // 2)
        self.keys = [mix(*key, number) for number in range(ROUNDS)]

    def __getitem__(self, index: int) -> int:
        low = (1 << self.half) - 1
        while True:
            left = index >> self.half
            right = index & low
            for key in self.keys:
                left, right = right, left ^ (mix(right ^ key) & low)
            index = left << self.half | right
            if index < self.count:
                return index

    def take(self, indices: range) -> np.ndarray:
        """Return the numbers at a range of indices."""
        half = np.uint64(self.half)
        low = np.uint64((1 << self.half) - 1)
        numbers = np.arange(indices.start, indices.stop, dtype=np.uint64)
        outside = np.ones(len(numbers), bool)
        while outside.any():
            high = numbers[outside] >> half
            rest = numbers[outside] & low
            for key in self.keys:
                high, rest = rest, high ^ (mix_array(rest ^ np.uint64(key)) & low)
            numbers[outside] = high << half | rest
            outside = numbers >= self.count
        return numbers.astype(np.int64)


class Order:
    """An endless sequence of sample numbers: epoch after epoch, each shuffled by seed and epoch."""

    def __init__(self, count: int, seed: int, shuffle: bool = True) -> None:
        self.count = count
        self.seed = seed
        self.shuffle = shuffle
        self._epoch = -1
        self._permutation = Permutation(count)

    def __getitem__(self, index: int) -> int:
        epoch, position = divmod(index, self.count)
        if not self.shuffle:
            return position
        return self._permute(epoch)[position]

    def _permute(self, epoch: int) -> Permutation:
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = Permutation(self.count, self.seed, epoch)
        return self._permutation

    def take(self, indices: range) -> np.ndarray:
        """Return the numbers at a range of indices within one epoch."""
        position = indices.start % self.count
        if not self.shuffle:
            return np.arange(position, position + len(indices))
        return self._permute(indices.start // self.count).take(range(position, position + len(indices)))
