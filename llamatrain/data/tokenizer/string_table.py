"""Texts, each once, in a table that compiled loops look into and add to."""

from typing import NamedTuple

import numpy as np

from llamatrain.compiler.declare import I32s, U8s, inline
from llamatrain.data.tokenizer.bpe_merge import word_key


class TextTable(NamedTuple):
    text: U8s
    ends: I32s  # where each ends in it, behind a 0
    slots: I32s  # by their keys: the number of each, from 1 on

    @property
    def room(self) -> int:
        return len(self.ends) - 1


def room_for(count: int, size: int) -> TextTable:
    """An empty table for so many texts of so many bytes in all."""
    slots = np.zeros(1 << (5 * count // 4).bit_length(), np.int32)
    return TextTable(np.empty(size, np.uint8), np.zeros(count + 1, np.int32), slots)


@inline
def find(known, source, start, end):
    """The slot of a text, or the free one where it would be."""
    mask = len(known.slots) - 1
    mixed = np.uint64(word_key(source, start, end)) * np.uint64(0x9E3779B97F4A7C15)
    at = np.int64(mixed >> np.uint64(32)) & mask
    while known.slots[at] and not _is(known, known.slots[at], source, start, end):
        at = (at + 1) & mask
    return at


@inline
def _is(known, number, source, start, end):
    begin = known.ends[number - 1]
    if known.ends[number] - begin != end - start:
        return False
    at = np.int64(0)
    while at < end - start and known.text[begin + at] == source[start + at]:
        at += 1
    return at == end - start
