"""Tokens of a text that changes at its end, as a conversation does turn by turn: what stays is not tokenized again."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from llamatrain.data.json_values import RecordTooLarge

SMALL = 1 << 10  # bytes that are tokenized again rather than cut
LARGE = 1 << 16  # bytes that are looked at once for a place to cut
HELD = 1 << 17  # bytes that are looked at for one at most
ENOUGH = 24 * 10**6  # bytes to tokenize for one text, besides thrice its own


class SafeCut(NamedTuple):
    """A place that stays one while the text's first `seen` bytes do."""

    seen: int
    at: int  # in bytes
    tokens: int  # before it


class IncrementalTokenizer:
    """`encode` makes tokens of what stands at a text's start or behind a cut; `cut` finds where it can be, whatever follows."""

    def __init__(
        self,
        encode: Callable[[bytes, bool], np.ndarray],
        cut: Callable[[bytes], int],
        size: int,
        small: int = SMALL,
    ) -> None:
        self.encode, self.cut, self.small = encode, cut, small
        self.left = ENOUGH + 3 * size
        self.text, self.changed = bytearray(), False
        self.cuts = [SafeCut(0, 0, 0)]
        self.made, self.count = (
            np.empty(3 * size if size > LARGE else 0, np.int32),
            0,
        )  # untouched, it takes no memory

    def change(self, same: int, rest: bytes | memoryview) -> None:
        """Put the rest behind the first `same` bytes."""
        while self.cuts[-1].seen > same:
            self.cuts.pop()
        del self.text[same:]
        self.text += rest
        self.changed = True

    @property
    def tokens(self) -> np.ndarray:
        """All of them, made when they are asked for; the next change may write over them."""
        if self.changed:
            self.count, self.changed = self.cuts[-1].tokens, False
            self._extend()
        return self.made[: self.count]

    def append(self, tokens: np.ndarray) -> None:
        end = self.count + len(tokens)
        if end > len(self.made):
            made = np.empty(end + end // 4 + 8, np.int32)
            made[: self.count] = self.made[: self.count]
            self.made = made
        self.made[self.count : end] = tokens
        self.count = end

    def _extend(self) -> None:
        at, size, look = self.cuts[-1].at, len(self.text), LARGE
        self.left -= size - at
        if self.left < 0:
            raise RecordTooLarge(
                f"its renderings differ so much that more than {ENOUGH:,} bytes would be tokenized again"
            )
        while size - at > self.small:
            raw = bytes(self.text[at : at + look])
            whole = at + len(raw) == size
            if cut := self.cut(raw):
                self.append(self.encode(raw[:cut], not at))
                at, look = at + cut, LARGE
                self.cuts.append(SafeCut(size, at, self.count))
            elif look >= HELD:  # who encodes the rest cuts it anywhere
                break
            else:
                look *= 2
            if whole:
                break
        self.append(self.encode(bytes(self.text[at:]), not at))
