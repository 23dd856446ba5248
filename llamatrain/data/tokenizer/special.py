"""Tokens that are found in a text before anything else: user-defined ones, and control tokens where they are to be read."""

import re
from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np

from llamatrain.data.tokenizer.vocabulary import Vocabulary
from llamatrain.gguf.constants import TokenType

BLANKS = re.compile(rb"[ \t\n\v\f\r]*")
BEGIN = 4  # bytes: tokens that begin alike are looked at together, or else thousands would be, wherever one may be
NEAR = 1 << 12  # bytes before a text's end that are looked at first


class Specials:
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
        self.stripping = set(ids) - unstripped if vocabulary.strips else set[int]()
        self._within = dict[bytes, list[bytes]]()

    @cached_property
    def _anywhere(self) -> re.Pattern[bytes]:
        """Finds at each place the longest token."""
        return re.compile(b"(?=(" + either(self.tokens) + b"))")

    @cached_property
    def _order(self) -> dict[bytes, int]:
        return {text: at for at, text in enumerate(self.tokens)}

    def inside(self, raw: bytes) -> list[bytes]:
        """Those that stand anywhere in a text, be it across others, the longest first."""
        if not self.tokens:
            return []
        found = {match[1] for match in self._anywhere.finditer(raw)}
        return sorted(
            {text for longest in found for text in self._beginning(longest)}, key=self._order.__getitem__
        )

    def _beginning(self, text: bytes) -> list[bytes]:
        """The tokens that a token begins with, itself among them."""
        if text not in self._within:
            self._within[text] = [
                begun for size in range(1, len(text) + 1) if (begun := text[:size]) in self.tokens
            ]
        return self._within[text]

    def last_apart(self, raw: bytes) -> int:
        """The last place where a token begins that will be one whatever follows; 0: none was found."""
        for near in (NEAR, len(raw)) if self.tokens else ():
            begin = max(0, len(raw) - near - 2 * self.longest)
            known = begin and begin + self.longest  # what begins before may have begun earlier
            for start, end in reversed([*self._clusters(raw, begin)]):
                if start < known:
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
        """Where tokens stand, with all that share bytes with them: no other can come into that but from its end."""
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
        """Split at each token, the longest first, of one length the first: a shorter one finds only what is left."""
        parts: list[bytes | int] = [raw]
        for text in self.inside(raw):
            token, cut = self.tokens[text], list[bytes | int]()
            for part in parts:
                if isinstance(part, int):
                    cut.append(part)
                elif token in self.stripping:
                    cut += stripped(part, text, token)
                else:
                    first, *rest = part.split(text)
                    cut.append(first)
                    for piece in rest:
                        cut += [token, piece]
            parts = cut
        return [part for part in parts if part != b""]


def stripped(part: bytes, text: bytes, token: int) -> Iterator[bytes | int]:
    """A text split at a token that takes the white space behind it along, before the next is looked for."""
    at = 0
    while (found := part.find(text, at)) >= 0:
        yield part[at:found]
        yield token
        at = BLANKS.match(part, found + len(text)).end()  # type: ignore[union-attr]
    yield part[at:]


def either(texts: Iterable[bytes]) -> bytes:
    """An expression for the longest of some texts, which come the longest first."""
    groups = dict[bytes, list[bytes]]()
    for text in texts:
        groups.setdefault(text[:BEGIN], []).append(text[BEGIN:])
    parts = (
        re.escape(begin) + b"(?:" + b"|".join(map(re.escape, rests)) + b")" for begin, rests in groups.items()
    )
    return b"|".join(parts)
