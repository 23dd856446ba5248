"""The tokenization engines: byte-level BPE of words (`gpt2`), and BPE of characters by score (`llama`) or merges."""

from typing import Protocol

import numpy as np

from llamatrain.compiler.declare import BoundArrays, I64s
from llamatrain.compiler.parallel import precompile
from llamatrain.data.tokenizer.bpe_merge import (
    Characters,
    MergeBuffer,
    Symbols,
    WholeWords,
    buffer_size,
    build_table,
    fill_table,
    last_seam,
    merge_text,
    merge_words,
    word_keys,
)
from llamatrain.data.tokenizer.bpe_tables import (
    byte_symbols,
    character_key,
    character_symbols,
    line_tokens,
    score_symbols,
    token_bytes,
)
from llamatrain.data.tokenizer.pretokenize import RegexState, Splitter, code_points, split, to_byte_offsets
from llamatrain.data.tokenizer.vocabulary import SPACE, Vocabulary
from llamatrain.errors import DataError

MAX_BYTES = 1 << 29  # bytes of one call
NO_LINES = np.zeros(0, np.int64)
NO_WORDS = WholeWords(
    keys=np.zeros(0, np.int64),
    tokens=np.zeros(0, np.int64),
    text=np.zeros(0, np.uint8),
    ends=np.zeros(0, np.int64),
)


class BpeEngine(Protocol):
    """Tokenizes text that contains no special tokens."""

    def encode(self, raw: bytes, start: bool) -> np.ndarray:
        """Return the tokens of a text; `start`: nothing precedes it, or a special token does."""
        ...

    def find_seam(self, raw: bytes) -> int:
        """Return an offset where the text can be cut without changing its tokens, or 0.

        The cut is safe whatever text follows.
        """
        ...


def check_size(raw: bytes) -> None:
    """Raise DataError if a text is too large for 32-bit offsets."""
    if len(raw) > MAX_BYTES:
        raise DataError(
            f"{len(raw)} bytes of text cannot be cut anywhere (the limit is {MAX_BYTES}); split the text",
            code="text-not-divisible",
        )


def drop_partial_character(raw: bytes) -> bytes:
    """Remove a character at the end that may lack some of its bytes."""
    for back in range(1, min(4, len(raw) + 1)):
        if raw[-back] >= 0xC0:
            return raw[:-back]
    return raw


def decode(raw: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return the code points of a text, and the text in which they replace unreadable bytes."""
    codes = np.empty(len(raw), np.int32)
    clean = np.empty(3 * len(raw), np.uint8)  # each byte may become a replacement
    count, size = code_points(np.frombuffer(raw, np.uint8), codes, clean)
    return codes[:count], clean[:size]


def byte_offset(raw: bytes, offset: int) -> int:
    """Convert an offset in code points to an offset in bytes."""
    at = np.array([offset], np.int64)
    to_byte_offsets(np.frombuffer(raw, np.uint8), at)
    return int(at[0])


class ByteLevelEngine:
    """Byte-level BPE of words.

    A seam is the end of a word (not of white space) that was found without looking at the end of the text.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        word_functions = [word_keys] if vocabulary.pre_tokenizer.whole_words else []
        precompile((fill_table, *word_functions, code_points, split, to_byte_offsets, merge_words))
        self.expressions = [
            Splitter.bind(expression) for expression in vocabulary.pre_tokenizer.expressions()
        ]
        self.symbols = BoundArrays(byte_symbols(vocabulary), Symbols)
        self.words = BoundArrays(
            build_word_table(vocabulary) if vocabulary.pre_tokenizer.whole_words else NO_WORDS, WholeWords
        )

    def encode(self, raw: bytes, start: bool) -> np.ndarray:
        """Return the tokens of a text."""
        check_size(raw)
        clean, word_ends = self._split_words(raw)
        out = np.empty(buffer_size(2 * len(clean)), np.int32)
        row = MergeBuffer.allocate(int(np.diff(word_ends, prepend=0).max(initial=0)))
        count = merge_words(clean, word_ends, self.symbols, self.words, row, out)
        return out[:count].copy()

    def _split_words(self, raw: bytes) -> tuple[np.ndarray, np.ndarray]:
        """Return the text without unreadable bytes, and the ends of its words."""
        codes, clean = decode(raw)
        word_ends = np.array([len(codes)], np.int64)
        for expression in self.expressions:
            last = expression is self.expressions[-1]
            word_ends, *_ = self._split(codes, expression, word_ends, codes.view(np.uint32) if last else None)
        to_byte_offsets(clean, word_ends)
        return clean, word_ends

    def find_seam(self, raw: bytes) -> int:
        """Return an offset where the text can be cut, or 0.

        It is that of the first expression that has one in the later half of the text.
        """
        raw = drop_partial_character(raw)
        codes, _ = decode(raw)
        seam, word_ends, known = 0, np.zeros(0, np.int64), len(codes)
        for expression in self.expressions if len(codes) else ():
            pieces = np.append(word_ends[word_ends < known], known)  # the last one goes on
            word_ends, settled, known = self._split(codes, expression, pieces)
            # White space may extend into following text, which a piece that ends there does not show.
            ends = (end for end in word_ends[::-1] if end <= settled and not chr(codes[end - 1]).isspace())
            seam = max(seam, int(next(ends, 0)))
            if seam > len(codes) // 2 or not known:
                break
        return byte_offset(raw, seam)

    def _split(
        self, codes: np.ndarray, expression: BoundArrays, pieces: np.ndarray, marks: np.ndarray | None = None
    ) -> tuple[np.ndarray, int, int]:
        """Return the ends of the words in code points, the last settled one, and how much text is known."""
        marks = np.empty(len(codes), np.uint32) if marks is None else marks
        word_ends = np.empty(len(codes), np.int64)
        count, settled, known = split(codes, expression, pieces, word_ends, marks, RegexState.allocate())
        return word_ends[:count], settled, known


def build_word_table(vocabulary: Vocabulary) -> WholeWords:
    """Build the table that finds tokens by their bytes."""
    spellings = list(map(token_bytes, vocabulary.tokens))
    text = np.frombuffer(b"".join(part or b"" for part in spellings), np.uint8)
    ends = np.cumsum([len(part or b"") for part in spellings], dtype=np.int64)
    keys = np.empty(len(ends), np.int64)
    word_keys(text, ends, keys)
    is_spelled = np.array([bool(part) for part in spellings])
    return WholeWords(*build_table(keys[is_spelled], np.flatnonzero(is_spelled)), text, ends)


class ScoredEngine:
    """BPE by score of the whole text.

    A seam lies between two characters that are never adjacent in any token.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.space = SPACE.encode()
        self.prefix = b" " if vocabulary.add_space_prefix else b""
        precompile((fill_table, merge_text, last_seam))
        characters, symbols = score_symbols(vocabulary)
        self.characters = BoundArrays(Characters(*characters), Characters)
        self.symbols = BoundArrays(symbols, Symbols)
        self.pairs = BoundArrays(symbols.keys, I64s)

    def encode(self, raw: bytes, start: bool) -> np.ndarray:
        """Return the tokens of a text."""
        check_size(raw)
        text = ((self.prefix if start else b"") + raw).replace(b" ", self.space)
        out = np.empty(buffer_size(len(text)), np.int32)
        row = MergeBuffer.allocate(len(text))
        count = merge_text(np.frombuffer(text, np.uint8), self.characters, self.symbols, NO_LINES, row, out)
        tokens = out[:count].copy()
        if count and tokens.min() < 0:
            raise DataError(
                f"the vocabulary has no token for the byte 0x{-1 - tokens[tokens < 0][0]:02X}, which "
                "the text contains",
                code="byte-not-in-vocabulary",
            )
        return tokens

    def find_seam(self, raw: bytes) -> int:
        """Return an offset where the text can be cut, or 0."""
        space = character_key(self.space)
        return int(last_seam(np.frombuffer(raw, np.uint8), space, self.characters, self.pairs))


class CharacterEngine:
    """BPE of the characters of each line by merges, as in Gemma 4.

    A seam lies between two characters that no merge joins.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.space = SPACE.encode()
        precompile((fill_table, code_points, to_byte_offsets, merge_text, last_seam))
        characters, symbols = character_symbols(vocabulary)
        self.characters = BoundArrays(Characters(*characters), Characters)
        self.symbols = BoundArrays(symbols, Symbols)
        self.pairs = BoundArrays(symbols.keys, I64s)
        self.lines = line_tokens(vocabulary) if vocabulary.pre_tokenizer.whole_lines else NO_LINES

    def encode(self, raw: bytes, start: bool) -> np.ndarray:
        """Return the tokens of a text; characters whose bytes have no tokens are left out."""
        check_size(raw)
        _, text = decode(raw.replace(b" ", self.space))
        out = np.empty(buffer_size(len(text)), np.int32)
        row = MergeBuffer.allocate(len(text))
        count = merge_text(text, self.characters, self.symbols, self.lines, row, out)
        tokens = out[:count]
        return tokens[tokens >= 0]

    def find_seam(self, raw: bytes) -> int:
        """Return an offset where the text can be cut, or 0."""
        raw = drop_partial_character(raw)
        _, text = decode(raw)
        seam = int(last_seam(text, character_key(self.space), self.characters, self.pairs))
        return byte_offset(raw, int(np.count_nonzero(text[:seam] & 0xC0 != 0x80)))


def create_engine(vocabulary: Vocabulary) -> BpeEngine:
    """Return the engine for a vocabulary."""
    if vocabulary.model == "llama":
        return ScoredEngine(vocabulary)
    return (CharacterEngine if vocabulary.pre_tokenizer.characters else ByteLevelEngine)(vocabulary)
