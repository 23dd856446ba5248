"""The order of samples: a permutation that is computed, not stored.

A Feistel network over the smallest even number of bits that holds all indices, walked until the result is one of them
(Black and Rogaway 2002). Where training stands is three numbers, resuming costs nothing, and nothing grows with the data.
"""

MASK = (1 << 64) - 1
ROUNDS = 8


def mix(*words: int) -> int:
    """64 well-mixed bits of some numbers (the finaliser of splitmix64, chained)."""
    state = 0x9E3779B97F4A7C15
    for word in words:
        state = (state + word * 0xBF58476D1CE4E5B9 + 0x9E3779B97F4A7C15) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return state


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


class Order:
    """An endless line of sample numbers: epoch after epoch, each shuffled by seed and epoch."""

    def __init__(self, count: int, seed: int, shuffle: bool = True) -> None:
        self.count, self.seed, self.shuffle = count, seed, shuffle
        self._epoch, self._permutation = -1, Permutation(count)

    def __getitem__(self, place: int) -> int:
        epoch, position = divmod(place, self.count)
        if not self.shuffle:
            return position
        if epoch != self._epoch:
            self._epoch, self._permutation = epoch, Permutation(self.count, self.seed, epoch)
        return self._permutation[position]
