"""Builds the tables for compiled merging: symbols, pairs, and spellings in tokens.

A symbol is a text that can occur while merging. Symbols that are tokens have the token's number; the others
follow: bytes, characters, or parts that a merge names.
"""

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, islice, pairwise

import numpy as np

from llamatrain.data.tokenizer.bpe_merge import NEVER, Symbols, build_table
from llamatrain.data.tokenizer.vocabulary import Vocabulary

LARGEST_RANK = int(NEVER)
CODEC = ("utf-8", "surrogateescape")
SURROGATE = re.compile("[\ud800-\udfff]")  # a byte that is not UTF-8


def byte_alphabet() -> str:
    """Return the character for each byte: itself if it is printable, else one from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return "".join(chr(byte) if byte in printable else chr(256 + hidden.index(byte)) for byte in range(256))


ALPHABET = byte_alphabet()
TO_BYTES = {code: chr(0xFFFF) for code in range(256)} | {
    ord(character): chr(byte) for byte, character in enumerate(ALPHABET)
}


def token_bytes(text: str) -> bytes | None:
    """Return the bytes of a byte-level token; None if it contains characters that stand for no byte."""
    try:
        return text.translate(TO_BYTES).encode("latin-1")
    except UnicodeEncodeError:
        return None


def pack_spellings(count: int, others: Iterable[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the offsets of each symbol's spelling in one array, and the array. A token spells itself."""
    lists = list(others)
    lengths = [1] * count + [len(tokens) for tokens in lists]
    row = [*range(count), *(token for tokens in lists for token in tokens)]
    return np.cumsum([0, *lengths], dtype=np.int64), np.array(row, np.int64)


def pack_pairs(
    lefts: Sequence[int], rights: Sequence[int], ranks: np.ndarray, results: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Build the table of pairs with their ranks and results."""
    keys = np.array(lefts, np.int64) << 32 | np.array(rights, np.int64)
    return build_table(keys, ranks.astype(np.int64) << 32 | np.array(results, np.int64))


# ---- byte-level ------------------------------------------------------------


def byte_symbols(vocabulary: Vocabulary) -> Symbols:
    """Build the symbols of a byte-level vocabulary: pairs in the order of its merges.

    A symbol that is no token is spelled in tokens of single bytes, if they exist.
    """
    index = dict(vocabulary.index)

    def symbol(text: str) -> int:
        return index.setdefault(text, len(index))

    bytes_ = np.array([symbol(character) for character in ALPHABET], np.int64)
    lefts = array("q")
    rights = array("q")
    results = array("q")
    for left, right in read_merges(vocabulary):
        lefts.append(symbol(left))
        rights.append(symbol(right))
        results.append(symbol(left + right))
    keys, values = pack_pairs(lefts, rights, np.arange(len(results)), results)
    others = list(index)[len(vocabulary.tokens) :]
    return Symbols(
        bytes_,
        keys,
        values,
        *pack_spellings(len(vocabulary.tokens), (spell_in_bytes(text, vocabulary) for text in others)),
    )


def read_merges(vocabulary: Vocabulary) -> Iterator[tuple[str, str]]:
    """Yield the parts that each merge joins."""
    for merge in vocabulary.merges:
        at = merge.find(" ", 1)  # a leading space belongs to the left part; without a space it is no merge
        if at > 0:
            yield merge[:at], merge[at + 1 :]


def spell_in_bytes(text: str, vocabulary: Vocabulary) -> list[int]:
    """Return the tokens of the single bytes of a text."""
    raw = in_bytes(text)
    singles = (bytes([byte]).decode("utf-8", "surrogateescape") for byte in raw)
    return [vocabulary.index[single] for single in singles if single in vocabulary.index]


# ---- by characters and merges ------------------------------------------------


def character_symbols(vocabulary: Vocabulary) -> tuple[tuple[np.ndarray, np.ndarray], Symbols]:
    """Build the table of characters and the pairs of a vocabulary of text, in the order of its merges.

    Characters that are adjacent where a merge joins two texts are pairs of the rank NEVER. Lines are merged
    separately, so newlines are never joined with other characters.
    """
    index = dict(vocabulary.index)

    def symbol(text: str) -> int:
        return index.setdefault(text, len(index))

    pairs = [each for each in read_merges(vocabulary) if "\n" not in "".join(each) or is_lines("".join(each))]
    lefts = [symbol(left) for left, _ in pairs]
    rights = [symbol(right) for _, right in pairs]
    results = [symbol(left + right) for left, right in pairs]
    neighbours = {(symbol(left[-1]), symbol(right[0])) for left, right in pairs if right}
    neighbours.add((symbol("\n"), symbol("\n")))
    ranks = np.append(np.arange(len(pairs)), np.full(len(neighbours), LARGEST_RANK))
    lefts += [left for left, _ in neighbours]
    rights += [right for _, right in neighbours]
    keys, values = pack_pairs(lefts, rights, ranks, results + [0] * len(neighbours))
    bytes_ = [vocabulary.index.get(f"<0x{byte:02X}>", -1) for byte in range(256)]
    spelled = (
        [bytes_[byte] for byte in in_bytes(text)] for text in islice(index, len(vocabulary.tokens), None)
    )
    spellings = pack_spellings(len(vocabulary.tokens), spelled)
    return build_character_table(index), Symbols(np.array(bytes_, np.int64), keys, values, *spellings)


def is_lines(text: str) -> bool:
    """Return True if a text consists of newlines only."""
    return text == "\n" * len(text)


def line_tokens(vocabulary: Vocabulary) -> np.ndarray:
    """Return the token of each number of newlines, up to the most that have one; -1 if they have none."""
    most = max((len(text) for text in vocabulary.tokens if is_lines(text)), default=0)
    return np.array([-1, *(vocabulary.index.get("\n" * size, -1) for size in range(1, most + 1))], np.int64)


# ---- by score --------------------------------------------------------------


def score_symbols(vocabulary: Vocabulary) -> tuple[tuple[np.ndarray, np.ndarray], Symbols]:
    """Build the table of characters and the pairs of a scored vocabulary.

    Each way to cut a token into two symbols is a pair, ranked by the token's score. Characters that are
    adjacent in a token but do not merge are pairs of the rank NEVER.
    """
    index = dict(vocabulary.index)
    for character in chain.from_iterable(map(split_characters, vocabulary.tokens)):
        if character not in index:
            index[character] = len(index)
    ranks = np.unique(-vocabulary.scores, return_inverse=True)[1]
    lefts = array("q")
    rights = array("q")
    results = array("q")
    neighbours = set[tuple[int, int]]()
    find = index.get
    for token, text in enumerate(vocabulary.tokens):
        characters = split_characters(text)
        neighbours.update(pairwise(map(index.__getitem__, characters)))
        for first, rest in split_in_two(text, characters):
            if (left := find(first)) is not None and (right := find(rest)) is not None:
                lefts.append(left)
                rights.append(right)
                results.append(token)
    merging = len(results)
    lefts.extend(left for left, _ in neighbours)
    rights.extend(right for _, right in neighbours)
    results.extend([0] * len(neighbours))
    order = np.concatenate([ranks[results[:merging]], np.full(len(neighbours), LARGEST_RANK)])
    keys, values = pack_pairs(lefts, rights, order, results)
    return build_character_table(index), Symbols(
        byte_tokens(vocabulary),
        keys,
        values,
        *pack_spellings(len(vocabulary.tokens), spell_others(index, vocabulary)),
    )


SIZES = [1] * 12 + [2, 2, 3, 4]  # bytes of a character, by the high half of its first byte


def split_characters(text: str) -> Sequence[str]:
    """Split text into characters by the length that the first byte announces, even if it is not UTF-8."""
    if SURROGATE.search(text) is None:
        return text
    raw = in_bytes(text)
    characters = list[str]()
    at = 0
    while at < len(raw):
        end = at + SIZES[raw[at] >> 4]
        characters.append(raw[at:end].decode(*CODEC))
        at = end
    return characters


def split_in_two(text: str, characters: Sequence[str]) -> list[tuple[str, str]]:
    """Return all ways to cut a text in two between characters."""
    if characters is text:
        return [(text[:at], text[at:]) for at in range(1, len(text))]
    raw = in_bytes(text)
    ends = accumulate(len(in_bytes(part)) for part in characters[:-1])
    return [(raw[:at].decode(*CODEC), raw[at:].decode(*CODEC)) for at in ends]


def in_bytes(text: str) -> bytes:
    """Encode a text whose lone surrogates are bytes."""
    return text.encode(*CODEC)


def build_character_table(index: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Build the table of symbols that are one character."""
    single = {
        text: symbol
        for text, symbol in index.items()
        if len(text) == 1 or (len(text) < 5 and len(split_characters(text)) == 1)
    }
    keys = [character_key(in_bytes(text)) for text in single]
    return build_table(np.array(keys, np.int64), np.array(list(single.values()), np.int64))


def character_key(text: bytes) -> int:
    """Return the bytes of a character as a number, below their count."""
    return int.from_bytes(text, "big") | len(text) << 8 * len(text)


def byte_tokens(vocabulary: Vocabulary) -> np.ndarray:
    """Return the token of each byte: `<0x0A>`, or the byte itself; if both are missing, -1 - byte."""
    index = vocabulary.index
    itself = [index.get(bytes([byte]).decode("utf-8", "surrogateescape"), -1 - byte) for byte in range(256)]
    return np.array([index.get(f"<0x{byte:02X}>", itself[byte]) for byte in range(256)], np.int64)


def spell_others(index: dict[str, int], vocabulary: Vocabulary) -> list[list[int]]:
    """Return the byte tokens that spell each symbol that is no token."""
    bytes_ = byte_tokens(vocabulary).tolist()
    others = islice(index, len(vocabulary.tokens), None)
    return [[bytes_[byte] for byte in in_bytes(text)] for text in others]
