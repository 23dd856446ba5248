"""The two ways from text to tokens: byte-level BPE of words (`gpt2`), and BPE by score of the whole text (`llama`)."""

from typing import Protocol

import numpy as np

from llamatrain.compiler.declare import BoundArrays, I64s
from llamatrain.compiler.parallel import precompile
from llamatrain.data.tokenizer.bpe_merge import (
    Characters,
    MergeBuffer,
    Symbols,
    WholeWords,
    fill,
    last_seam,
    merge_text,
    merge_words,
    room,
    table,
    word_keys,
)
from llamatrain.data.tokenizer.bpe_tables import byte_symbols, character_key, score_symbols, token_bytes
from llamatrain.data.tokenizer.pretokenize import RegexState, Splitter, code_points, in_bytes, split
from llamatrain.data.tokenizer.vocabulary import SPACE, Vocabulary
from llamatrain.errors import DataError

LARGEST = 1 << 29  # bytes at once
NO_WORDS = WholeWords(
    keys=np.zeros(0, np.int64),
    tokens=np.zeros(0, np.int64),
    text=np.zeros(0, np.uint8),
    ends=np.zeros(0, np.int64),
)


class BpeEngine(Protocol):
    def tokens(self, raw: bytes, start: bool) -> np.ndarray:
        """The tokens of a text without special ones; `start`: nothing stands before it, or a special token does."""
        ...

    def seam(self, raw: bytes) -> int:
        """A place where the text may be cut, whatever follows it: the tokens of both parts are those of the whole. 0: none."""
        ...


def check_size(raw: bytes) -> None:
    if len(raw) > LARGEST:
        raise DataError(
            f"{len(raw)} bytes of text without a place where they can be cut; {LARGEST} are the most"
        )


def whole_characters(raw: bytes) -> bytes:
    """Without a character at the end that may lack some of its bytes."""
    for back in range(1, min(4, len(raw) + 1)):
        if raw[-back] >= 0xC0:
            return raw[:-back]
    return raw


class ByteLevel:
    """A seam is the end of a word, not of white space, that was found without a look at the text's end: nothing can change it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        words = [word_keys] if vocabulary.cutting.whole_words else []
        precompile((fill, *words, code_points, split, in_bytes, merge_words))
        self.expressions = [Splitter.by(each) for each in vocabulary.cutting.expressions()]
        self.symbols = BoundArrays(byte_symbols(vocabulary), Symbols)
        self.words = BoundArrays(
            whole_words(vocabulary) if vocabulary.cutting.whole_words else NO_WORDS, WholeWords
        )

    def tokens(self, raw: bytes, start: bool) -> np.ndarray:
        check_size(raw)
        clean, words = self._words(raw)
        out = np.empty(room(2 * len(clean)), np.int32)
        row = MergeBuffer.of(int(np.diff(words, prepend=0).max(initial=0)))
        made = merge_words(clean, words, self.symbols, self.words, row, out)
        return out[:made].copy()

    def _words(self, raw: bytes) -> tuple[np.ndarray, np.ndarray]:
        """The text without what cannot be read, and where its words end. For long ones, memory counts."""
        codes, clean = self._read(raw)
        words = np.array([len(codes)], np.int64)
        for expression in self.expressions:
            last = expression is self.expressions[-1]
            words, _ = self._cut(codes, expression, words, codes.view(np.uint32) if last else None)
        in_bytes(clean, words)
        return clean, words

    def seam(self, raw: bytes) -> int:
        raw = whole_characters(raw)
        codes, _ = self._read(raw)
        if not len(codes):
            return 0
        words, settled = self._cut(codes, self.expressions[0], np.array([len(codes)], np.int64))
        # White space ends where it does for what follows it, which a piece that ends there does not show.
        found = (end for end in words[::-1] if end <= settled and not chr(codes[end - 1]).isspace())
        seam = np.array([next(found, 0)], np.int64)
        in_bytes(np.frombuffer(raw, np.uint8), seam)
        return int(seam[0])

    def _read(self, raw: bytes) -> tuple[np.ndarray, np.ndarray]:
        codes, clean = (
            np.empty(len(raw), np.int32),
            np.empty(3 * len(raw), np.uint8),
        )  # each byte may become a replacement
        count, size = code_points(np.frombuffer(raw, np.uint8), codes, clean)
        return codes[:count], clean[:size]

    def _cut(
        self, codes: np.ndarray, expression: BoundArrays, pieces: np.ndarray, marks: np.ndarray | None = None
    ) -> tuple[np.ndarray, int]:
        """The words' ends in code points, and how many of these are settled."""
        marks = np.empty(len(codes), np.uint32) if marks is None else marks
        words = np.empty(len(codes), np.int64)
        count, settled = split(codes, expression, pieces, words, marks, RegexState.new())
        return words[:count], settled


def whole_words(vocabulary: Vocabulary) -> WholeWords:
    """The table of tokens by their bytes: keys, tokens, all bytes, where each token ends in them."""
    spelt = list(map(token_bytes, vocabulary.tokens))
    text = np.frombuffer(b"".join(part or b"" for part in spelt), np.uint8)
    ends = np.cumsum([len(part or b"") for part in spelt], dtype=np.int64)
    keys = np.empty(len(ends), np.int64)
    word_keys(text, ends, keys)
    there = np.array([bool(part) for part in spelt])
    return WholeWords(*table(keys[there], np.flatnonzero(there)), text, ends)


class ScoredEngine:
    """A seam lies between two characters that never stand side by side in any token."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.space = SPACE.encode()
        self.prefix = b" " if vocabulary.add_space_prefix else b""
        precompile((fill, merge_text, last_seam))
        characters, symbols = score_symbols(vocabulary)
        self.characters = BoundArrays(Characters(*characters), Characters)
        self.symbols, self.pairs = BoundArrays(symbols, Symbols), BoundArrays(symbols.keys, I64s)

    def tokens(self, raw: bytes, start: bool) -> np.ndarray:
        check_size(raw)
        text = ((self.prefix if start else b"") + raw).replace(b" ", self.space)
        out = np.empty(room(len(text)), np.int32)
        made = merge_text(
            np.frombuffer(text, np.uint8), self.characters, self.symbols, MergeBuffer.of(len(text)), out
        )
        tokens = out[:made].copy()
        if made and tokens.min() < 0:
            raise DataError(
                f"the vocabulary has no token for the byte 0x{-1 - tokens[tokens < 0][0]:02X}, which the text needs"
            )
        return tokens

    def seam(self, raw: bytes) -> int:
        space = character_key(self.space)
        return int(last_seam(np.frombuffer(raw, np.uint8), space, self.characters, self.pairs))


def engine(vocabulary: Vocabulary) -> BpeEngine:
    return ScoredEngine(vocabulary) if vocabulary.model == "llama" else ByteLevel(vocabulary)
