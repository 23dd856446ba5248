"""A JSON file that is one array, or objects one after the other, read element by element."""

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from llamatrain.data.json_values import parsed
from llamatrain.errors import DataError
from llamatrain.platform.terminal import say

CHUNK = 1 << 18
LONGEST = 64 << 20  # bytes of an element
STEPS = np.zeros(256, np.int8)
STEPS[list(b"[{")], STEPS[list(b"]}")] = 1, -1
BLANK = b" \t\r\n"
WRAPPERS = ("data", "rows", "train", "examples", "instances")  # keys under which an object may have all rows
WRAPPER = re.compile(rb'\s*\{\s*"(?:%s)"\s*:\s*\[(?=\s*\{)' % "|".join(WRAPPERS).encode())
NEXT = re.compile(rb'\s*,\s*"([^"\\]{1,40})"\s*:\s*\[\s*\{')  # behind the rows that are read: more of them


class EndOfInput(NamedTuple):
    """In a chunk: where something ends, and how deep that is from there on."""

    at: int
    depth: int


class Scanner:
    """Where commas and brackets stand in JSON that comes in chunks, outside of strings."""

    def __init__(self) -> None:
        self.depth, self.within = 0, False

    def ends(self, chunk: bytes, level: int) -> Iterator[EndOfInput]:
        """The commas at a level, and the brackets that close what is at the lowest; a chunk ends in no half escape."""
        clean = chunk.replace(b"\\\\", b"__").replace(b'\\"', b"__") if b"\\" in chunk else chunk
        letters = np.frombuffer(clean, np.uint8)
        inside = np.logical_xor.accumulate(letters == ord('"')) ^ self.within
        steps = STEPS[letters]
        steps[inside] = 0
        depth = np.cumsum(steps, dtype=np.int64) + self.depth
        ends = ((letters == ord(",")) & ~inside & (depth <= level)) | ((steps < 0) & (depth <= 0))
        places = np.flatnonzero(ends)
        self.depth, self.within = int(depth[-1]), bool(inside[-1])
        yield from map(EndOfInput, places.tolist(), depth[places].tolist())


def elements_of(stream: BinaryIO, name: str) -> Iterator[tuple[int, bytes]]:
    """Those of an array, or the values that stand one behind the other, counted from 1."""
    chunks = whole_escapes(stream)
    first = b""
    while not first.strip(BLANK):
        if not (more := next(chunks, b"")):
            return
        first = more
    begin = first.lstrip(BLANK)[:20]
    if begin[:1] not in (b"[", b"{"):
        words = begin.decode("utf-8", "replace")
        raise DataError(
            f"{name}: no JSON of rows: it begins with {words!r}, where an array begins with [ and an object with {{"
        )
    if wrapper := WRAPPER.match(first):
        yield from Elements(name, is_array=True, wrapped=True).of(b"[" + first[wrapper.end() :], chunks)
    elif begin.startswith(b"["):
        yield from Elements(name, is_array=True).of(first, chunks)
    else:
        yield from unwrapped(Elements(name, is_array=False).of(first, chunks), name)


def unwrapped(elements: Iterator[tuple[int, bytes]], name: str) -> Iterator[tuple[int, bytes]]:
    """Give the rows of an object that is alone and has them under a key, behind others."""
    alone = next(elements, None)
    second = next(elements, None)
    if alone is None:
        return
    rows = None if second else rows_within(alone[1], name)
    if rows is None:
        yield from (each for each in (alone, second) if each)
        yield from elements
    else:
        yield from ((number, json.dumps(row).encode()) for number, row in enumerate(rows, 1))


def rows_within(text: bytes, name: str) -> list[Any] | None:
    if not any(b'"%s"' % key.encode() in text for key in WRAPPERS):
        return None
    try:
        row = parsed(text)
    except (ValueError, RecursionError):
        return None
    lists = {key: value for key, value in row.items() if is_rows(value)} if isinstance(row, dict) else {}
    key = next((key for key in WRAPPERS if key in lists), None)
    if key is None:
        return None
    warn_of_others(name, tuple(other for other in lists if other != key))
    return lists[key]


def is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


@cache
def warn_of_others(name: str, keys: tuple[str, ...]) -> None:
    """Say once that a file, which may be read several times, has more rows than those that are read, and under which keys."""
    if others := " and ".join(map(json.dumps, keys)):
        say(
            f"warning: {name}: rows under {others} are left out; put them into a file of their own to use them"
        )


def whole_escapes(stream: BinaryIO) -> Iterator[bytes]:
    """Chunks none of which ends in the midst of an escape."""
    rest = b""
    while chunk := stream.read(CHUNK):
        chunk = rest + chunk
        odd = (len(chunk) - len(chunk.rstrip(b"\\"))) % 2
        rest = chunk[len(chunk) - odd :]
        if len(chunk) > odd:
            yield chunk[: len(chunk) - odd]
    if rest:
        yield rest


class Elements:
    def __init__(self, name: str, is_array: bool, wrapped: bool = False) -> None:
        self.name, self.is_array, self.wrapped = name, is_array, wrapped  # in an object, which may have more
        self.count, self.begun = 0, bytearray()

    def of(self, chunk: bytes, more: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
        scanner, over = Scanner(), False
        if self.is_array:
            chunk = b"[" + chunk.lstrip(BLANK)[1:]
        at = 1 if self.is_array else 0
        while chunk:
            for found in () if over else scanner.ends(chunk, int(self.is_array)):
                letter = chunk[found.at : found.at + 1]
                if self.is_array:
                    over = found.depth == 0
                    if found.depth < 0 or (letter == b",") == over or (over and letter != b"]"):
                        raise DataError(
                            f"{self.name}, element {self.count + 1}: {letter.decode()!r} stands where it cannot"
                        )
                    self.add(chunk[at : found.at])
                    if not over or self.begun.strip(BLANK) or self.count:
                        yield self.taken()
                elif letter != b",":
                    self.add(chunk[at : found.at + 1])
                    yield self.taken()
                else:
                    raise DataError(
                        f"{self.name}: a comma behind element {self.count}, and no array around it"
                    )
                at = found.at + 1
                if over:
                    if self.wrapped and (others := NEXT.match(chunk, at)):
                        warn_of_others(self.name, (others[1].decode("utf-8", "replace"),))
                    break
            if not (over and self.wrapped):
                self.add(chunk[at:])
            if over and self.begun.strip(BLANK):
                told = bytes(self.begun.strip(BLANK)[:20]).decode("utf-8", "replace")
                raise DataError(
                    f"{self.name}: the array of {self.count} elements is followed by more: {told!r}; a file is one array"
                )
            chunk, at = next(more, b""), 0
        if (self.is_array and not over) or self.begun.strip(BLANK):
            raise DataError(
                f"{self.name}, element {self.count + 1}: the file ends within it: it was cut short, or a bracket is missing"
            )
        if self.is_array and not self.count:
            raise DataError(f"{self.name}: the array is empty")

    def add(self, piece: bytes) -> None:
        self.begun += piece
        if len(self.begun) > LONGEST:
            raise DataError(
                f"{self.name}, element {self.count + 1}: is longer than {LONGEST >> 20} MiB; a quote or a bracket may be missing"
            )

    def taken(self) -> tuple[int, bytes]:
        self.count += 1
        text = bytes(self.begun.strip(BLANK))
        self.begun = bytearray()
        if not text:
            raise DataError(
                f"{self.name}, element {self.count}: there is nothing between two commas, or behind the last"
            )
        return self.count, text
