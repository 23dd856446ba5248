"""Tokens of a text that changes at its end, as a conversation does turn by turn: what stays is not tokenized again."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from llamatrain.data.forms import TooMuch

SMALL = 1 << 10  # bytes that are tokenized again rather than cut
LARGE = 1 << 19  # bytes that are looked at once for a place to cut
ENOUGH = 24 * 10**6  # bytes to tokenize for one text, besides thrice its own


class Piece(NamedTuple):
    """Tokens that stay what they are while the text's first `seen` bytes do."""

    seen: int
    end: int  # in bytes
    tokens: np.ndarray
    so_far: int  # tokens up to its end


class Begun(NamedTuple):
    """The tokens of a text that another one begins like: how many are the same for certain, and the others."""

    same: int
    others: np.ndarray

    def agreeing(self, tokens: np.ndarray) -> int:
        """How many tokens the two have in common at their beginning."""
        return self.same + agreeing(self.others, tokens[self.same :])


class Growing:
    """`encode` makes tokens of what stands at a text's start or behind a cut; `cut` finds where it can be, whatever follows."""

    def __init__(self, encode: Callable[[bytes, bool], np.ndarray], cut: Callable[[bytes], int], size: int) -> None:
        self.encode, self.cut = encode, cut
        self.left = ENOUGH + 3 * size
        self.text = bytearray()
        self.pieces: list[Piece] = []
        self.tail = np.zeros(0, np.int32)

    def change(self, same: int, rest: bytes) -> Begun:
        """Put the rest behind the first `same` bytes; tells the tokens that there were, as a beginning of the new ones."""
        others = [self.tail]
        while self.pieces and self.pieces[-1].seen > same:
            others.append(self.pieces.pop().tokens)
        del self.text[same:]
        self.text += rest
        before = Begun(self.count, np.concatenate(others[::-1]))
        self._extend()
        return before

    @property
    def count(self) -> int:
        return self.pieces[-1].so_far if self.pieces else 0

    @property
    def tokens(self) -> np.ndarray:
        return np.concatenate([*(piece.tokens for piece in self.pieces), self.tail])

    def _extend(self) -> None:
        at, size = self.pieces[-1].end if self.pieces else 0, len(self.text)
        self.left -= size - at
        if self.left < 0:
            raise TooMuch(f"its renderings differ so much that more than {ENOUGH:,} bytes would be tokenized again")
        look = LARGE
        while size - at > SMALL:
            raw = bytes(self.text[at : at + look])
            if cut := self.cut(raw):
                tokens = self.encode(raw[:cut], not at)
                self.pieces.append(Piece(seen=size, end=at + cut, tokens=tokens, so_far=self.count + len(tokens)))
                at += cut
                look = LARGE
            else:
                look *= 2
            if len(raw) == size - at + cut:
                break
        self.tail = self.encode(bytes(self.text[at:]), not at)


def agreeing(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two lists have in common at their beginning."""
    short = min(len(a), len(b))
    different = np.flatnonzero(a[:short] != b[:short])
    return int(different[0]) if len(different) else short
