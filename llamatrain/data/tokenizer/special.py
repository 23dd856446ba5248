"""Finds special tokens in text: user-defined ones always, control tokens if they are parsed."""

import re
from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np

from llamatrain.data.tokenizer.vocabulary import Vocabulary
from llamatrain.gguf.constants import TokenType

BLANKS = re.compile(rb"[ \t\n\v\f\r]*")
PREFIX_BYTES = 4  # bytes; tokens with the same prefix are tried together, not thousands at each offset
NEAR_END = 1 << 12  # bytes before the end of a text, searched first


class SpecialTokens:
    """The special tokens of a vocabulary, by their texts."""

    def __init__(self, vocabulary: Vocabulary, *, control: bool) -> None:
        kinds = (
            [TokenType.USER_DEFINED, TokenType.CONTROL, TokenType.UNKNOWN]
            if control
            else [TokenType.USER_DEFINED]
        )
        ids = np.flatnonzero(np.isin(vocabulary.kinds, kinds)).tolist()
        texts = {vocabulary.tokens[token].encode("utf-8", "surrogateescape"): token for token in ids}
        self.tokens = dict(sorted(texts.items(), key=lambda item: -len(item[0])))
        self.longest = max(map(len, texts), default=0)
        unstripped = {vocabulary.index.get(text) for text in ("<unk>", "<s>", "<|endoftext|>")}
        self.stripping = set(ids) - unstripped if vocabulary.strips_spaces else set[int]()
        self._known_prefixes = dict[bytes, list[bytes]]()

    @cached_property
    def _anywhere(self) -> re.Pattern[bytes]:
        """Matches the longest token at each offset."""
        return re.compile(b"(?=(" + build_alternation(self.tokens) + b"))")

    @cached_property
    def _order(self) -> dict[bytes, int]:
        return {text: at for at, text in enumerate(self.tokens)}

    def find_all(self, raw: bytes) -> list[bytes]:
        """Return the tokens anywhere in a text, even overlapping ones, the longest first."""
        if not self.tokens:
            return []
        longest_matches = {match[1] for match in self._anywhere.finditer(raw)}
        return sorted(
            {text for longest in longest_matches for text in self._prefixes(longest)},
            key=self._order.__getitem__,
        )

    def _prefixes(self, text: bytes) -> list[bytes]:
        """Return the tokens that a token begins with, including itself."""
        if text not in self._known_prefixes:
            self._known_prefixes[text] = [
                prefix for size in range(1, len(text) + 1) if (prefix := text[:size]) in self.tokens
            ]
        return self._known_prefixes[text]

    def find_last(self, raw: bytes) -> int:
        """Return the last offset where a token begins whatever follows; 0 if there is none."""
        for near in (NEAR_END, len(raw)) if self.tokens else ():
            begin = max(0, len(raw) - near - 2 * self.longest)
            certain = begin and begin + self.longest  # a token before this offset may overlap an earlier one
            for start, end in reversed([*self._clusters(raw, begin)]):
                if start < certain:
                    break
                blank = self.stripping and BLANKS.match(raw, start, start + 1).end() > start  # type: ignore[union-attr]
                if (
                    end + self.longest <= len(raw)
                    and not blank
                    and isinstance(self.partition(raw[start:end])[0], int)
                ):
                    return start
        return 0

    def _clusters(self, raw: bytes, begin: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of overlapping tokens; another token can enter a range only from its end."""
        start = end = begin
        for match in self._anywhere.finditer(raw, begin):
            if match.start() >= end:
                if end > start:
                    yield start, end
                start = match.start()
            end = max(end, match.end(1))
        if end > start:
            yield start, end

    def partition(self, raw: bytes) -> list[bytes | int]:
        """Split text at each token, the longest first; a shorter one is searched only in the rest."""
        parts: list[bytes | int] = [raw]
        for text in self.find_all(raw):
            token = self.tokens[text]
            cut = list[bytes | int]()
            for part in parts:
                if isinstance(part, int):
                    cut.append(part)
                elif token in self.stripping:
                    cut += split_stripped(part, text, token)
                else:
                    first, *rest = part.split(text)
                    cut.append(first)
                    for piece in rest:
                        cut += [token, piece]
            parts = cut
        return [part for part in parts if part != b""]


def split_stripped(part: bytes, text: bytes, token: int) -> Iterator[bytes | int]:
    """Split text at a token that removes the white space after it, before other tokens are searched."""
    at = 0
    while (match_at := part.find(text, at)) >= 0:
        yield part[at:match_at]
        yield token
        at = BLANKS.match(part, match_at + len(text)).end()  # type: ignore[union-attr]
    yield part[at:]


def build_alternation(texts: Iterable[bytes]) -> bytes:
    """Return an expression that matches the longest of some texts, which are sorted by length."""
    groups = dict[bytes, list[bytes]]()
    for text in texts:
        groups.setdefault(text[:PREFIX_BYTES], []).append(text[PREFIX_BYTES:])
    parts = (
        re.escape(prefix) + b"(?:" + b"|".join(map(re.escape, suffixes)) + b")"
        for prefix, suffixes in groups.items()
    )
    return b"|".join(parts)
