"""Decodes text to code points, and splits them into words with the programs of `regex.py`, compiled."""

from typing import NamedTuple

import numpy as np

from llamatrain.compiler.declare import BoundArrays, Function, I32s, I64Rows, I64s, Int, U8s, U32s, inline
from llamatrain.data.tokenizer.regex import GROUPS, UNLIMITED, Expression

ITEMS, ALTERNATIVES = 16, 64  # more than any expression has
# Columns of `tried`: an item's run, its current end, and the range where it is known to fail.
FROM, TO, NOW, LOW, HIGH = range(5)
REPLACEMENT = np.int64(0xFFFD)  # replaces bytes that are not UTF-8, as in llama.cpp


class Splitter(NamedTuple):
    """An expression, or digit groups: the classes that each code point belongs to, and a program."""

    table: U32s
    program: I64s

    @staticmethod
    def bind(expression: Expression) -> BoundArrays:
        """Return an expression as an argument for compiled code."""
        return BoundArrays(Splitter(expression.marks, expression.program), Splitter)


class RegexState(NamedTuple):
    """The attempts at each item of an alternative, and the offsets up to which alternatives cannot match."""

    tried: I64Rows
    dead: I64s

    @staticmethod
    def allocate() -> "RegexState":
        """Allocate the state."""
        return RegexState(np.empty((ITEMS + 1, 5), np.int64), np.zeros(ALTERNATIVES, np.int64))


@inline
def _continues(text, at, count):
    if at + count >= len(text):
        return False
    read = at + 1
    while read <= at + count and text[read] & 0xC0 == 0x80:
        read += 1
    return read > at + count


@inline
def _read(text, at):
    """Return the code point at an offset, and the offset after it.

    As in llama.cpp, each unreadable byte is one replacement, and overlong forms and surrogates are read.
    """
    lead = np.int64(text[at])
    more = (
        0 if lead < 0x80 else 1 if lead >> 5 == 6 else 2 if lead >> 4 == 14 else 3 if lead >> 3 == 30 else -1
    )
    if more < 0 or not _continues(text, at, more):
        return REPLACEMENT, at + 1
    code = lead & (0x7F >> (more + 1 if more > 0 else 0))
    for i in range(at + 1, at + more + 1):
        code = code << 6 | np.int64(text[i]) & 0x3F
    return code if code <= 0x10FFFF else REPLACEMENT, at + more + 1


@Function
def code_points(text: U8s, codes: I32s, clean: U8s) -> tuple[Int, Int]:
    """Decode text to code points and to clean UTF-8; return the number of each."""
    at, count, out = np.int64(0), np.int64(0), np.int64(0)
    while at < len(text):
        code, at = _read(text, at)
        if code < 0x80:
            clean[out] = code
        else:
            size = 1 if code < 0x800 else 2 if code < 0x10000 else 3
            clean[out] = (0xFF00 >> (size + 1) & 0xFF) | code >> 6 * size
            for i in range(1, size + 1):
                clean[out + i] = 0x80 | code >> 6 * (size - i) & 0x3F
            out += size
        out += 1
        codes[count] = code
        count += 1
    return count, out


@Function
def to_byte_offsets(text: U8s, offsets: I64s) -> None:
    """Convert offsets in code points to offsets in bytes, in place."""
    at = count = np.int64(0)
    for i in range(len(offsets)):
        while count < offsets[i]:
            _, at = _read(text, at)
            count += 1
        offsets[i] = at


@inline
def _open(tried, item, at):
    """Return the offset, or the next one before it, where an item and those after it may still match."""
    return tried[item, LOW] - 1 if tried[item, LOW] <= at <= tried[item, HIGH] else at


@inline
def _close(tried, item, at):
    """Record that an item and those after it do not match at an offset, next to the known ones."""
    if at == tried[item, LOW] - 1:
        tried[item, LOW] = at
    elif at == tried[item, HIGH] + 1:
        tried[item, HIGH] = at
    else:
        tried[item, LOW] = tried[item, HIGH] = at


@inline
def _match(marks, at, end, program, start, tried):
    """Return the end of the match of an alternative, or -1, and whether it met the end of the text."""
    items, forbidden = program[start], np.uint32(program[start + 1])
    item, met, back = np.int64(0), False, False
    while True:
        if item < items:
            row = start + 2 + 3 * item
            bit, most = np.uint32(program[row]), program[row + 2]
            to, known = at, tried[item, FROM] if back and most == UNLIMITED else np.int64(-1)
            while to != known and to < end and to - at < most and marks[to] & bit:
                to += 1
            to = tried[item, TO] if to == known else to
            met |= to == end and to - at < most
            tried[item, FROM], tried[item, TO] = at, to
            to = _open(tried, item + 1, to) if back else to
            tried[item, NOW] = to
            if to - at >= program[row + 1]:
                at = to
                item += 1
                continue
        elif at == end or not marks[at] & forbidden:
            return at, met or (at == end and forbidden != 0)
        if not back:
            back = True
            for i in range(items + 1):
                tried[i, LOW] = tried[i, HIGH] = -2
                if i > item:
                    tried[i, FROM] = -2
        _close(tried, item, at)
        item -= 1
        while item >= 0:
            at = _open(tried, item + 1, tried[item, NOW] - 1)
            if at - tried[item, FROM] >= program[start + 3 + 3 * item]:
                break
            _close(tried, item, tried[item, FROM])
            item -= 1
        if item < 0:
            return np.int64(-1), met
        tried[item, NOW] = at
        item += 1


@inline
def _first_match(marks, at, end, program, tried, dead):
    start, met, number = np.int64(0), False, np.int64(-1)
    while start < len(program):
        row = start
        start += 2 + 3 * program[row]
        number += 1
        # most alternatives fail at their first character
        if at < dead[number] or (
            program[row] and program[row + 3] and not marks[at] & np.uint32(program[row + 2])
        ):
            continue
        to, looked = _match(marks, at, end, program, row, tried)
        met |= looked
        if to > at:
            return to, met
        # An alternative that begins with `+` cannot match later in this run either.
        if program[row + 3] == 1 and program[row + 4] == UNLIMITED:
            dead[number] = tried[0, TO]
    return np.int64(-1), met


@inline
def _split_groups(marks, program, pieces, words):
    """Split pieces into groups of digits and the text between them; return the same as `split`."""
    count, at, settled = np.int64(0), np.int64(0), np.int64(0)
    last = pieces[-1]
    first_open = last
    for end in pieces:
        begin = at
        while at < end:
            run = at
            while at < end and marks[at]:
                at += 1
            if at == run:
                at += 1
                continue
            if at == last:
                first_open = run
            short = (at - run) % 3
            for group in range(run + short, at + program[1], 3):
                if group > begin and (group > run or not program[1]):
                    words[count] = begin = np.int64(group)
                    count += 1
            if at < last:
                settled = begin
        if end > begin:
            words[count] = end
            count += 1
    return count, settled, first_open


@Function
def split(
    codes: I32s, cut: Splitter, pieces: I64s, words: I64s, marks: U32s, trial: RegexState
) -> tuple[Int, Int, Int]:
    """Split pieces, given by their ends, into the matches of an expression and the text between them.

    Return the number of words, the end of the last match that more text could not change, and the offset of
    the first attempt that met the end of the text.
    """
    last = pieces[-1]
    for i in range(last):
        marks[i] = cut.table[codes[i]]
    if cut.program[0] == GROUPS:
        return _split_groups(marks, cut.program, pieces, words)
    count, at, settled, open_end = np.int64(0), np.int64(0), np.int64(0), False
    first_open = last
    for end in pieces:
        begin = at
        while at < end:
            to, met = _first_match(marks, at, end, cut.program, trial.tried, trial.dead)
            if met and end == last and not open_end:
                open_end, first_open = True, at
            if to < 0:
                at += 1
                continue
            if at > begin:
                words[count] = at
                count += 1
            words[count] = to
            count += 1
            at = begin = to
            if not open_end:
                settled = to
        if at > begin:
            words[count] = at
            count += 1
    return count, settled, first_open
