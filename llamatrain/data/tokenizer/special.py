"""Tokens that are found in a text before anything else: user-defined ones, and control tokens where they are to be read."""

import re
from functools import cached_property

import numpy as np

from llamatrain.data.tokenizer.vocabulary import Vocabulary
from llamatrain.files.constants import TokenType

BLANK = b" \t\n\v\f\r"
APART = 64  # bytes, beyond which it is not asked


class Specials:
    def __init__(self, vocabulary: Vocabulary, *, control: bool) -> None:
        kinds = [TokenType.USER_DEFINED, TokenType.CONTROL, TokenType.UNKNOWN] if control else [TokenType.USER_DEFINED]
        ids = np.flatnonzero(np.isin(vocabulary.kinds, kinds)).tolist()
        texts = {vocabulary.tokens[token].encode("utf-8", "surrogateescape"): token for token in ids}
        self.tokens = dict(sorted(texts.items(), key=lambda item: -len(item[0])))
        self._apart = dict[bytes, bool]()
        self.longest = max(map(len, texts), default=0)
        unstripped = {vocabulary.index.get(text) for text in ("<unk>", "<s>", "<|endoftext|>")}
        self.stripping = set(ids) - unstripped if vocabulary.strips else set[int]()

    @cached_property
    def _anywhere(self) -> re.Pattern[bytes]:
        """Finds at each place the longest token."""
        return re.compile(b"(?=(" + b"|".join(map(re.escape, self.tokens)) + b"))")

    def inside(self, raw: bytes) -> list[bytes]:
        """Those that stand anywhere in a text, be it across others, the longest first."""
        if not self.tokens:
            return []
        found = {match[1] for match in self._anywhere.finditer(raw)}
        if not found:
            return []
        return [text for text in self.tokens if text in found or any(longer.startswith(text) for longer in found)]

    def stands_apart(self, text: bytes) -> bool:
        """Whether a token is one wherever its text stands: no other can share some of it, hold it or strip it."""
        if text not in self._apart:
            begins = tuple(text[:size] for size in range(1, min(len(text), APART)))
            ends = tuple(text[size:] for size in range(1, min(len(text), APART)))
            self._apart[text] = (
                len(text) <= APART
                and not text[:1].isspace()
                and not any(other[1:].endswith(begins) or other[:-1].startswith(ends) for other in self.tokens)
                and not any(text in other for other in self.tokens if other != text)
            )
        return self._apart[text]

    def partition(self, raw: bytes) -> list[bytes | int]:
        """Splitter at each token, the longest first, of one length the first: a shorter one finds only what is left."""
        parts: list[bytes | int] = [raw]
        for text in self.inside(raw):
            token, cut = self.tokens[text], list[bytes | int]()
            for part in parts:
                if isinstance(part, int):
                    cut.append(part)
                    continue
                first, *rest = part.split(text)
                cut.append(first)
                for piece in rest:
                    cut += [token, piece.lstrip(BLANK) if token in self.stripping else piece]
            parts = cut
        return [part for part in parts if part != b""]
