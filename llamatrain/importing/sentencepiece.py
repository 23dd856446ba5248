"""Reads the pieces of SentencePiece's `tokenizer.model`, which is a message of protocol buffers.

Of the message ModelProto, field 1 (repeated) is a piece, which has a text (1), a score (2) and a type (3);
field 3 is the normalizer, whose field 3 says if a space is put before a text.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from llamatrain.config.read_limited import read_limited
from llamatrain.errors import FileError
from llamatrain.gguf.constants import TokenType

MOST_BYTES = 1 << 28
VARINT, EIGHT_BYTES, BYTES, FOUR_BYTES = 0, 1, 2, 5  # how a field is stored
KEPT_TYPES = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.UNUSED, TokenType.BYTE)


class Piece(NamedTuple):
    """A token, with the score by which merges are chosen."""

    text: str
    score: float
    kind: TokenType


class Pieces(NamedTuple):
    """The pieces of a file, and whether a space is put before a text."""

    pieces: list[Piece]
    space_prefix: bool


def read_pieces(path: Path) -> Pieces:
    """Read a `tokenizer.model`; raise FileError if it is no such file."""
    raw = read_limited(path, MOST_BYTES, "a tokenizer")
    pieces, space_prefix = [], True
    try:
        for field, value in iterate_fields(memoryview(raw)):
            if field == 1:
                pieces.append(_read_piece(value))
            elif field == 3:
                space_prefix = bool(dict(iterate_fields(value)).get(3, True))
    except (ValueError, LookupError, TypeError, struct.error):
        pieces = []
    if not pieces:
        raise FileError(
            f"{path}: not a SentencePiece model; if the folder has a tokenizer.json, remove this file to use it",
            code="bad-tokenizer",
        )
    return Pieces(pieces, space_prefix)


def _read_piece(raw: memoryview) -> Piece:
    fields = dict(iterate_fields(raw))
    kind = fields.get(3, TokenType.NORMAL)
    score = struct.unpack("<f", fields[2])[0] if 2 in fields else 0.0
    text = str(fields[1], "utf-8")
    return Piece(text, score, TokenType(kind) if kind in KEPT_TYPES else TokenType.NORMAL)


def iterate_fields(raw: memoryview) -> Iterator[tuple[int, Any]]:
    """Yield the number of each field of a message and its value, a number or bytes.

    Raise ValueError if the message is cut off.
    """
    at = 0
    while at < len(raw):
        key, at = _read_varint(raw, at)
        field, wire = key >> 3, key & 7
        if wire == VARINT:
            value, at = _read_varint(raw, at)
            yield field, value
            continue
        if wire == BYTES:
            size, at = _read_varint(raw, at)
        elif wire in (EIGHT_BYTES, FOUR_BYTES):
            size = 8 if wire == EIGHT_BYTES else 4
        else:
            raise ValueError(wire)
        if size > len(raw) - at:
            raise ValueError(size)
        yield field, raw[at : at + size]
        at += size


def _read_varint(raw: memoryview, at: int) -> tuple[int, int]:
    """Return the number at an offset, and the offset behind it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = raw[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError(at)
