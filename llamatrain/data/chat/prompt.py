"""Tokenizes prompts and answers as a server does.

Control tokens are parsed, one begin token leads each row, and each answer has one end token.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from llamatrain.data.json_values import RecordTooLarge
from llamatrain.data.tokenizer.vocabulary import EndTokens

# ---- tokens of a text that changes at its end ------------------------------------

RETOKENIZED_BYTES = 1 << 10  # shorter texts are tokenized again without a cut
LARGE_TEXT = 1 << 16  # bytes searched at once for a place to cut
MAX_EXAMINED = 1 << 17  # bytes searched for one at most
MAX_RETOKENIZED = 24 * 10**6  # bytes to tokenize for one text, in addition to three times its own


class SafeCut(NamedTuple):
    """A safe cut: valid while the first `valid_bytes` bytes of the text are unchanged."""

    valid_bytes: int
    offset: int  # in bytes
    tokens: int  # before the cut


class IncrementalTokenizer:
    """Tokenizes a text whose end changes, such as a growing chat, without repeating its beginning.

    `encode` tokenizes a piece (at the start of the text or after a cut); `cut` finds a place where the text
    can be cut whatever follows.
    """

    def __init__(
        self,
        encode: Callable[[bytes, bool], np.ndarray],
        cut: Callable[[bytes], int],
        size: int,
        small: int = RETOKENIZED_BYTES,
    ) -> None:
        self.encode = encode
        self.cut = cut
        self.small = small
        self.bytes_left = MAX_RETOKENIZED + 3 * size
        self.text = bytearray()
        self.is_stale = False
        self.cuts = [SafeCut(0, 0, 0)]
        self.buffer = np.empty(3 * size if size > LARGE_TEXT else 0, np.int32)  # untouched memory is free
        self.count = 0

    def replace_end(self, same: int, rest: bytes | memoryview) -> None:
        """Replace everything after the first `same` bytes."""
        while self.cuts[-1].valid_bytes > same:
            self.cuts.pop()
        del self.text[same:]
        self.text += rest
        self.is_stale = True

    @property
    def tokens(self) -> np.ndarray:
        """The tokens of the whole text, computed when they are read; the next change may overwrite them."""
        if self.is_stale:
            self.count = self.cuts[-1].tokens
            self.is_stale = False
            self._encode_rest()
        return self.buffer[: self.count]

    def append(self, tokens: np.ndarray) -> None:
        """Append tokens to the buffer."""
        end = self.count + len(tokens)
        if end > len(self.buffer):
            larger = np.empty(end + end // 4 + 8, np.int32)
            larger[: self.count] = self.buffer[: self.count]
            self.buffer = larger
        self.buffer[self.count : end] = tokens
        self.count = end

    def _encode_rest(self) -> None:
        offset = self.cuts[-1].offset
        size = len(self.text)
        examined = LARGE_TEXT
        self.bytes_left -= size - offset
        if self.bytes_left < 0:
            raise RecordTooLarge(
                "its renderings differ so much that more than "
                f"{MAX_RETOKENIZED:,} bytes would be tokenized again; split the chat",
                code="row-too-large",
            )
        while size - offset > self.small:
            raw = bytes(self.text[offset : offset + examined])
            is_rest = offset + len(raw) == size
            if cut := self.cut(raw):
                self.append(self.encode(raw[:cut], not offset))
                offset += cut
                examined = LARGE_TEXT
                self.cuts.append(SafeCut(size, offset, self.count))
            elif examined >= MAX_EXAMINED:  # the tokenizer cuts the rest anywhere
                break
            else:
                examined *= 2
            if is_rest:
                break
        self.append(self.encode(bytes(self.text[offset:]), not offset))


# ---- prompts and answers ---------------------------------------------------------

TOKEN_BLOCK = 1 << 16  # tokens examined at once
BORDER_BYTES = 64  # bytes of a text that show how it is tokenized after others


class TokenizerLike(Protocol):
    """The part of a tokenizer that data needs."""

    bos: int | None
    eos: int | None
    eot: int | None
    ends: EndTokens
    add_bos: bool
    add_eos: bool
    chat_template: str | None
    tool_template: str | None  # for chats with tools
    rerank_template: str | None  # for a query and a document that may answer it

    def __len__(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """A hash of everything that affects tokens."""
        ...

    def encode(self, text: str | bytes, *, special: bool = False, start: bool = True) -> np.ndarray:
        """Return the tokens of a text; without `start`, it follows a cut."""
        ...

    def find_cut(self, raw: bytes, *, special: bool = False) -> int:
        """Return an offset where text can be cut whatever follows; 0 if there is none."""
        ...

    def encode_large(self, chunks: Iterable[bytes]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the bytes and tokens of one text that comes in chunks."""
        ...

    def decode(self, ids: np.ndarray) -> bytes:
        """Return the text of tokens."""
        ...


class PromptReader:
    """Tokenizes prompts and answers separately where a model begins to speak."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self.tokenizer = tokenizer
        self.bos = tokenizer.bos if tokenizer.add_bos else None  # begins each row
        # by last token of a prompt: whether text after it is tokenized alone
        self._separate = dict[int, bool]()
        self._eats_space = dict[int, bool]()

    @cached_property
    def ends(self) -> dict[int, str]:
        """The tokens that end an answer, with their texts."""
        return {token: self.token_text(token) for token in sorted(self.tokenizer.ends.turn)}

    @cached_property
    def end(self) -> np.ndarray:
        """The token that is appended to an answer without an end, as an array."""
        eos = self.tokenizer.eos if self.tokenizer.eos is not None else self.tokenizer.eot
        return np.array([] if eos is None else [eos], np.int32)

    def start_text(self, size: int, small: int = RETOKENIZED_BYTES) -> IncrementalTokenizer:
        """Return a tokenizer for a text that grows."""
        return IncrementalTokenizer(self.encode_prompt, self._find_cut, size, small)

    def encode_prompt(self, text: str | bytes, start: bool = True) -> np.ndarray:
        """Encode the beginning of a row, without the begin token that is put before each row anyway."""
        tokens = self.tokenizer.encode(text, special=True, start=start)
        return (
            tokens[1:] if start and self.bos is not None and len(tokens) and tokens[0] == self.bos else tokens
        )

    def encode_continuation(self, text: bytes, after_control: bool, last: int | None) -> np.ndarray:
        """Encode text that follows other tokens, by itself.

        `after_control`: encode as after a control token; `last`: the token before it.
        """
        if self.eats_space(last):
            text = text.lstrip()
            after_control = True
        tokenizer = IncrementalTokenizer(
            lambda raw, start: self.tokenizer.encode(raw, special=True, start=start and after_control),
            self._find_cut,
            len(text),
        )
        tokenizer.replace_end(0, text)
        return tokenizer.tokens

    def tokenizes_alone(self, prompt: np.ndarray, text: bytes) -> bool:
        """Return True if a text is tokenized after a prompt as it is alone.

        Some vocabularies put a space after control tokens.
        """
        token = int(prompt[-1]) if len(prompt) else self.bos
        if token is None or self.eats_space(token):
            return True
        if token not in self._separate:
            self._separate[token] = self._test_separate(token, b"x")
        return self._separate[token] or self._test_separate(token, text)

    def eats_space(self, token: int | None) -> bool:
        """Return True if a token removes the white space after it."""
        return token is not None and self._any_end_eats_space and self._test_eats_space(token)

    @cached_property
    def _any_end_eats_space(self) -> bool:
        return any(map(self._test_eats_space, self.ends))  # if some do, nearly all do

    def _test_eats_space(self, token: int) -> bool:
        if token not in self._eats_space:
            prefix = self.tokenizer.decode(np.array([token], np.int32))
            spaced, bare = (
                self.tokenizer.encode(prefix + text, special=True, start=False) for text in (b" x", b"x")
            )
            self._eats_space[token] = np.array_equal(spaced, bare)
        return self._eats_space[token]

    def _test_separate(self, token: int, text: bytes) -> bool:
        prefix = self.tokenizer.decode(np.array([token], np.int32))
        both, alone = (
            self.tokenizer.encode(part, special=True, start=False) for part in (prefix + text, text)
        )
        return self.tokenizer.decode(both) == prefix + self.tokenizer.decode(alone)

    def has_end(self, tokens: np.ndarray) -> bool:
        """Return True if the last token ends an answer."""
        return len(tokens) > 0 and int(tokens[-1]) in self.ends

    def find_end(self, tokens: np.ndarray) -> int:
        """Return the number of tokens up to and including the first end token."""
        for begin in range(0, len(tokens), TOKEN_BLOCK):
            if len(hits := np.flatnonzero(np.isin(tokens[begin : begin + TOKEN_BLOCK], [*self.ends]))):
                return begin + int(hits[0]) + 1
        return len(tokens)

    def find_token(self, text: str) -> int | None:
        """Return the token of a text, or None if the text is several tokens."""
        tokens = self.tokenizer.encode(text, special=True, start=False)
        return int(tokens[0]) if len(tokens) == 1 else None

    def token_text(self, token: int | None) -> str:
        """Return the text of a token."""
        return (
            ""
            if token is None
            else self.tokenizer.decode(np.array([token], np.int32)).decode("utf-8", "replace")
        )

    def _find_cut(self, raw: bytes) -> int:
        return self.tokenizer.find_cut(raw, special=True)
