"""Prompts and answers as a server has them: control tokens are read, one begin token leads, an answer has one end."""

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from llamatrain.data.json_values import RecordTooLarge
from llamatrain.data.tokenizer.vocabulary import EndTokens

# ---- tokens of a text that changes at its end ------------------------------------

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


# ---- prompts and answers ---------------------------------------------------------

BLOCK = 1 << 16  # tokens that are looked at at once
BORDER = 64  # bytes of a text that show how it is read behind others


class TokenizerLike(Protocol):
    """What is asked of a tokenizer here."""

    bos: int | None
    eos: int | None
    eot: int | None
    ends: EndTokens
    add_bos: bool
    add_eos: bool
    chat_template: str | None
    tool_template: str | None  # for chats with tools

    def __len__(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    def encode(self, text: str | bytes, *, special: bool = False, start: bool = True) -> np.ndarray: ...

    def cut(self, raw: bytes, *, special: bool = False) -> int: ...

    def encode_large(self, chunks: Iterable[bytes]) -> Iterator[tuple[int, np.ndarray]]: ...

    def decode(self, ids: np.ndarray) -> bytes: ...


class PromptReader:
    """Texts to tokens, apart where a model begins to speak."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self.tokenizer = tokenizer
        self.lead = tokenizer.bos if tokenizer.add_bos else None  # what each row begins with
        self._joined = dict[int, bool]()  # of tokens that prompts end in, whether letters join them
        self._strips = dict[int, bool]()

    @cached_property
    def ends(self) -> dict[int, str]:
        """The tokens that end an answer, with their texts."""
        return {token: self.text_of(token) for token in sorted(self.tokenizer.ends.turn)}

    @cached_property
    def end(self) -> np.ndarray:
        """The token that is put where an answer has no end."""
        eos = self.tokenizer.eos if self.tokenizer.eos is not None else self.tokenizer.eot
        return np.array([] if eos is None else [eos], np.int32)

    def growing(self, size: int, small: int = SMALL) -> IncrementalTokenizer:
        return IncrementalTokenizer(self.begun, self._cut, size, small)

    def begun(self, text: str | bytes, start: bool = True) -> np.ndarray:
        """Less the begin token, which is put before each row anyway."""
        tokens = self.tokenizer.encode(text, special=True, start=start)
        return (
            tokens[1:]
            if start and self.lead is not None and len(tokens) and tokens[0] == self.lead
            else tokens
        )

    def behind(self, text: bytes, token: bool, last: int | None) -> np.ndarray:
        """The tokens of what stands behind others, by itself; `token`: as behind a control token; `last`: the one before it."""
        if self.strips(last):
            text, token = text.lstrip(), True
        made = IncrementalTokenizer(
            lambda raw, start: self.tokenizer.encode(raw, special=True, start=start and token),
            self._cut,
            len(text),
        )
        made.change(0, text)
        return made.tokens

    def joins(self, prompt: np.ndarray, text: bytes) -> bool:
        """Whether a text is read behind a prompt as it is by itself: some vocabularies put a space behind control tokens."""
        token = int(prompt[-1]) if len(prompt) else self.lead
        if token is None or self.strips(token):
            return True
        if token not in self._joined:
            self._joined[token] = self._same(token, b"x")
        return self._joined[token] or self._same(token, text)

    def strips(self, token: int | None) -> bool:
        """Whether a token takes the white space behind it along: what follows is read as if none were there."""
        return token is not None and self._some_strip and self._strip(token)

    @cached_property
    def _some_strip(self) -> bool:
        return any(map(self._strip, self.ends))  # where some do, nearly all do

    def _strip(self, token: int) -> bool:
        if token not in self._strips:
            before = self.tokenizer.decode(np.array([token], np.int32))
            spaced, bare = (
                self.tokenizer.encode(before + each, special=True, start=False) for each in (b" x", b"x")
            )
            self._strips[token] = np.array_equal(spaced, bare)
        return self._strips[token]

    def _same(self, token: int, text: bytes) -> bool:
        before = self.tokenizer.decode(np.array([token], np.int32))
        both, alone = (
            self.tokenizer.encode(each, special=True, start=False) for each in (before + text, text)
        )
        return self.tokenizer.decode(both) == before + self.tokenizer.decode(alone)

    def ended(self, tokens: np.ndarray) -> bool:
        return len(tokens) > 0 and int(tokens[-1]) in self.ends

    def first_end(self, tokens: np.ndarray) -> int:
        """How many tokens there are up to the first at which a model stops, with that."""
        for at in range(0, len(tokens), BLOCK):
            if len(found := np.flatnonzero(np.isin(tokens[at : at + BLOCK], [*self.ends]))):
                return at + int(found[0]) + 1
        return len(tokens)

    def token_of(self, text: str) -> int | None:
        """The one token that a text is read as."""
        tokens = self.tokenizer.encode(text, special=True, start=False)
        return int(tokens[0]) if len(tokens) == 1 else None

    def text_of(self, token: int | None) -> str:
        return (
            ""
            if token is None
            else self.tokenizer.decode(np.array([token], np.int32)).decode("utf-8", "replace")
        )

    def _cut(self, raw: bytes) -> int:
        return self.tokenizer.cut(raw, special=True)
