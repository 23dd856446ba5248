"""Vocabularies as numbers for the compiled merging: symbols, the pairs that merge, and how symbols are spelt in tokens.

A symbol is a text that can come up while merging. Those that are tokens have the token's number; behind them come texts
that are no tokens: bytes, characters, or parts that a merge names.
"""

import re
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, islice, pairwise

import numpy as np

from llamatrain.data.tokenizer.bpe_merge import NEVER, Symbols, table
from llamatrain.data.tokenizer.vocabulary import Vocabulary

LARGEST_RANK = int(NEVER)
CODEC = ("utf-8", "surrogateescape")
SURROGATE = re.compile("[\ud800-\udfff]")  # a byte that is no text


def byte_alphabet() -> str:
    """The character that stands for each byte: itself where it can be seen, others from 256 on."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in seen]
    return "".join(chr(byte) if byte in seen else chr(256 + hidden.index(byte)) for byte in range(256))


ALPHABET = byte_alphabet()
TO_BYTES = {code: chr(0xFFFF) for code in range(256)} | {
    ord(character): chr(byte) for byte, character in enumerate(ALPHABET)
}


def token_bytes(text: str) -> bytes | None:
    """What a byte-level token stands for; None if it has characters that stand for no byte."""
    try:
        return text.translate(TO_BYTES).encode("latin-1")
    except UnicodeEncodeError:
        return None


def spellings(count: int, others: Iterable[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Where each symbol's tokens begin in one row, and the row: a token spells itself, the others as given."""
    lists = list(others)
    lengths = [1] * count + [len(tokens) for tokens in lists]
    row = [*range(count), *(token for tokens in lists for token in tokens)]
    return np.cumsum([0, *lengths], dtype=np.int64), np.array(row, np.int64)


def packed(
    lefts: Sequence[int], rights: Sequence[int], ranks: np.ndarray, results: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    keys = np.array(lefts, np.int64) << 32 | np.array(rights, np.int64)
    return table(keys, ranks.astype(np.int64) << 32 | np.array(results, np.int64))


# ---- byte-level ------------------------------------------------------------


def byte_symbols(vocabulary: Vocabulary) -> Symbols:
    """Pairs as the merges name them, in their order; what is no token is spelt in tokens of single bytes, if there are any."""
    index = dict(vocabulary.index)

    def symbol(text: str) -> int:
        return index.setdefault(text, len(index))

    bytes_ = np.array([symbol(character) for character in ALPHABET], np.int64)
    lefts, rights, results = array("q"), array("q"), array("q")
    for merge in vocabulary.merges:
        at = merge.find(" ", 1)  # a space in front belongs to the left part; without any it is no merge
        if at > 0:
            left, right = merge[:at], merge[at + 1 :]
            lefts.append(symbol(left))
            rights.append(symbol(right))
            results.append(symbol(left + right))
    keys, values = packed(lefts, rights, np.arange(len(results)), results)
    others = list(index)[len(vocabulary.tokens) :]
    return Symbols(
        bytes_,
        keys,
        values,
        *spellings(len(vocabulary.tokens), (single_bytes(text, vocabulary) for text in others)),
    )


def single_bytes(text: str, vocabulary: Vocabulary) -> list[int]:
    raw = in_bytes(text)
    singles = (bytes([byte]).decode("utf-8", "surrogateescape") for byte in raw)
    return [vocabulary.index[single] for single in singles if single in vocabulary.index]


# ---- by score --------------------------------------------------------------


def score_symbols(vocabulary: Vocabulary) -> tuple[tuple[np.ndarray, np.ndarray], Symbols]:
    """The table of characters, and the pairs: each way to cut a token into two symbols, the highest score first.

    Characters that stand side by side in a token without being one themselves are pairs, too, of the rank NEVER.
    """
    index = dict(vocabulary.index)
    for character in chain.from_iterable(map(characters_in, vocabulary.tokens)):
        if character not in index:
            index[character] = len(index)
    ranks = np.unique(-vocabulary.scores, return_inverse=True)[1]
    lefts, rights, results = array("q"), array("q"), array("q")
    neighbours, find = set[tuple[int, int]](), index.get
    for token, text in enumerate(vocabulary.tokens):
        characters = characters_in(text)
        neighbours.update(pairwise(map(index.__getitem__, characters)))
        for first, rest in halves(text, characters):
            if (left := find(first)) is not None and (right := find(rest)) is not None:
                lefts.append(left)
                rights.append(right)
                results.append(token)
    merging = len(results)
    lefts.extend(left for left, _ in neighbours)
    rights.extend(right for _, right in neighbours)
    results.extend([0] * len(neighbours))
    order = np.concatenate([ranks[results[:merging]], np.full(len(neighbours), LARGEST_RANK)])
    keys, values = packed(lefts, rights, order, results)
    return characters_of(index), Symbols(
        byte_tokens(vocabulary),
        keys,
        values,
        *spellings(len(vocabulary.tokens), other_spellings(index, vocabulary)),
    )


SIZES = [1] * 12 + [2, 2, 3, 4]  # of a character, by the high half of its first byte


def characters_in(text: str) -> Sequence[str]:
    """As its first byte tells how many bytes each has, be they UTF-8 or not."""
    if SURROGATE.search(text) is None:
        return text
    raw, found, at = in_bytes(text), list[str](), 0
    while at < len(raw):
        end = at + SIZES[raw[at] >> 4]
        found.append(raw[at:end].decode(*CODEC))
        at = end
    return found


def halves(text: str, characters: Sequence[str]) -> list[tuple[str, str]]:
    """A text cut in two between each two characters."""
    if characters is text:
        return [(text[:at], text[at:]) for at in range(1, len(text))]
    raw, ends = in_bytes(text), accumulate(len(in_bytes(each)) for each in characters[:-1])
    return [(raw[:at].decode(*CODEC), raw[at:].decode(*CODEC)) for at in ends]


def in_bytes(text: str) -> bytes:
    return text.encode(*CODEC)


def characters_of(index: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """The symbols that are one character, by their bytes as a number with the count of bytes above."""
    single = {
        text: symbol
        for text, symbol in index.items()
        if len(text) == 1 or (len(text) < 5 and len(characters_in(text)) == 1)
    }
    keys = [character_key(in_bytes(text)) for text in single]
    return table(np.array(keys, np.int64), np.array(list(single.values()), np.int64))


def character_key(text: bytes) -> int:
    return int.from_bytes(text, "big") | len(text) << 8 * len(text)


def byte_tokens(vocabulary: Vocabulary) -> np.ndarray:
    """`<0x0A>`, or the byte itself where that is a token; with neither a negative number that tells the byte: -1 - byte."""
    index = vocabulary.index
    itself = [index.get(bytes([byte]).decode("utf-8", "surrogateescape"), -1 - byte) for byte in range(256)]
    return np.array([index.get(f"<0x{byte:02X}>", itself[byte]) for byte in range(256)], np.int64)


def other_spellings(index: dict[str, int], vocabulary: Vocabulary) -> list[list[int]]:
    bytes_ = byte_tokens(vocabulary).tolist()
    others = islice(index, len(vocabulary.tokens), None)
    return [[bytes_[byte] for byte in in_bytes(text)] for text in others]
