"""The two ways from text to tokens: byte-level BPE of words (`gpt2`), and BPE by score of the whole text (`llama`)."""

from typing import Protocol

import numpy as np

from llamatrain.data.tokenizer import merging, splitting
from llamatrain.data.tokenizer.symbols import byte_symbols, character_key, score_symbols, token_bytes
from llamatrain.data.tokenizer.tables import table
from llamatrain.data.tokenizer.vocabulary import SPACE, Vocabulary
from llamatrain.errors import DataError

LARGEST = 1 << 29  # bytes at once


class Engine(Protocol):
    def tokens(self, raw: bytes, start: bool) -> np.ndarray:
        """The tokens of a text without special ones; `start`: nothing stands before it, or a special token does."""
        ...

    def seam(self, raw: bytes) -> int:
        """A place where the text may be cut, whatever follows it: the tokens of both parts are those of the whole. 0: none."""
        ...


def check_size(raw: bytes) -> None:
    if len(raw) > LARGEST:
        raise DataError(f"{len(raw)} bytes of text without a place where they can be cut; {LARGEST} are the most")


def whole_characters(raw: bytes) -> bytes:
    """Without a character at the end that may lack some of its bytes."""
    for back in range(1, min(4, len(raw) + 1)):
        if raw[-back] >= 0xC0:
            return raw[:-back]
    return raw


class ByteLevel:
    """A seam is the end of a word, not of white space, that was found without a look at the text's end: nothing can change it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.expressions = vocabulary.cutting.expressions()
        self.symbols = byte_symbols(vocabulary)
        nothing = np.zeros(0, np.int64)
        self.words = nothing, nothing, np.frombuffer(b"", np.uint8), nothing
        if vocabulary.cutting.whole_words:
            self.words = whole_words(vocabulary)
        self._code_points, self._split, self._merge = splitting.code_points(), splitting.split(), merging.merge_words()

    def tokens(self, raw: bytes, start: bool) -> np.ndarray:
        check_size(raw)
        clean, words = self._words(raw)
        out = np.empty(2 * len(clean), np.int32)
        made = self._merge(clean, words, *self.symbols, *self.words, out)
        return out[:made].copy()

    def _words(self, raw: bytes) -> tuple[np.ndarray, np.ndarray]:
        """The text without what cannot be read, and where its words end. For long ones, memory counts."""
        codes, clean, ends = self._read(raw, False)
        clean = clean[: ends[-1] if len(ends) else 0]
        pieces = np.array([len(codes)], np.int64)
        for expression in self.expressions:
            last = expression is self.expressions[-1]
            words, marks = np.empty(len(codes), np.int64), codes.view(np.uint32) if last else np.empty(len(codes), np.uint32)
            count, _ = self._split(codes, expression.marks, expression.program, pieces, words, marks)
            pieces = words[:count]
        return clean, ends[pieces - 1].astype(np.int64)

    def seam(self, raw: bytes) -> int:
        codes, _, ends = self._read(whole_characters(raw), True)
        if not len(codes):
            return 0
        first, whole = self.expressions[0], np.array([len(codes)], np.int64)
        words, marks = np.empty(len(codes), np.int64), np.empty(len(codes), np.uint32)
        count, settled = self._split(codes, first.marks, first.program, whole, words, marks)
        # White space ends where it does for what follows it, which a piece that ends there does not show.
        found = (end for end in words[:count][::-1] if end <= settled and not chr(codes[end - 1]).isspace())
        last = next(found, 0)
        return int(ends[last - 1]) if last else 0

    def _read(self, raw: bytes, in_text: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        codes, ends = np.empty(len(raw), np.int32), np.empty(len(raw), np.int32)
        clean = np.empty(3 * len(raw), np.uint8)  # each byte may become a replacement
        count = self._code_points(np.frombuffer(raw, np.uint8), codes, clean, ends, in_text)
        return codes[:count], clean, ends[:count]


def whole_words(vocabulary: Vocabulary) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The table of tokens by their bytes: keys, tokens, all bytes, where each token ends in them."""
    spelt = list(map(token_bytes, vocabulary.tokens))
    text = np.frombuffer(b"".join(part or b"" for part in spelt), np.uint8)
    ends = np.cumsum([len(part or b"") for part in spelt], dtype=np.int64)
    keys = np.empty(len(ends), np.int64)
    merging.word_keys()(text, ends, keys)
    there = np.array([bool(part) for part in spelt])
    return *table(keys[there], np.flatnonzero(there)), text, ends


class Scored:
    """A seam lies between two characters that never stand side by side in any token."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.space = SPACE.encode()
        self.prefix = b" " if vocabulary.add_space_prefix else b""
        self.characters, self.symbols = score_symbols(vocabulary)
        self._merge, self._last_seam = merging.merge_text(), merging.last_seam()

    def tokens(self, raw: bytes, start: bool) -> np.ndarray:
        check_size(raw)
        text = ((self.prefix if start else b"") + raw).replace(b" ", self.space)
        out = np.empty(len(text), np.int32)
        made = self._merge(np.frombuffer(text, np.uint8), *self.characters, *self.symbols, out)
        tokens = out[:made].copy()
        if made and tokens.min() < 0:
            raise DataError(f"the vocabulary has no token for the byte 0x{-1 - tokens[tokens < 0][0]:02X}, which the text needs")
        return tokens

    def seam(self, raw: bytes) -> int:
        space = character_key(self.space)
        return int(self._last_seam(np.frombuffer(raw, np.uint8), space, *self.characters, self.symbols.keys))


def engine(vocabulary: Vocabulary) -> Engine:
    return Scored(vocabulary) if vocabulary.model == "llama" else ByteLevel(vocabulary)
