"""Reads a JSON file that is one array, or a sequence of objects, element by element."""

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from llamatrain.data.files import DataFile, Format
from llamatrain.data.json_values import parse_json
from llamatrain.errors import DataError
from llamatrain.platform.terminal import log_line

CHUNK = 1 << 18  # bytes
MAX_ELEMENT_BYTES = 64 << 20
DEPTH_CHANGES = np.zeros(256, np.int8)  # by byte
DEPTH_CHANGES[list(b"[{")] = 1
DEPTH_CHANGES[list(b"]}")] = -1
BLANK = b" \t\r\n"
WRAPPERS = ("data", "rows", "train", "examples", "instances")  # keys under which an object may hold all rows
WRAPPER = re.compile(rb'\s*\{\s*"(?:%s)"\s*:\s*\[(?=\s*\{)' % "|".join(WRAPPERS).encode())
NEXT_KEY = re.compile(rb'\s*,\s*"([^"\\]{1,40})"\s*:\s*\[\s*\{')  # more rows, after those that are read
ARRAY = re.compile(rb'\[\s*\{\s*"')


class ElementEnd(NamedTuple):
    """The offset in a chunk at which an element ends, and the nesting depth after it."""

    offset: int
    depth: int


class Scanner:
    """Finds the commas and brackets outside of strings in JSON that comes in chunks."""

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False

    def ends(self, chunk: bytes, level: int) -> Iterator[ElementEnd]:
        """Yield the commas at a nesting level, and the brackets that close an outermost value.

        A chunk must not end within an escape.
        """
        clean = chunk.replace(b"\\\\", b"__").replace(b'\\"', b"__") if b"\\" in chunk else chunk
        letters = np.frombuffer(clean, np.uint8)
        inside = np.logical_xor.accumulate(letters == ord('"')) ^ self.in_string
        changes = DEPTH_CHANGES[letters]
        changes[inside] = 0
        depth = np.cumsum(changes, dtype=np.int64) + self.depth
        ends = ((letters == ord(",")) & ~inside & (depth <= level)) | ((changes < 0) & (depth <= 0))
        offsets = np.flatnonzero(ends)
        self.depth = int(depth[-1])
        self.in_string = bool(inside[-1])
        yield from map(ElementEnd, offsets.tolist(), depth[offsets].tolist())


def read_rows(source: DataFile) -> Iterator[tuple[int, bytes]]:
    """Yield the elements of a file, numbered from 1."""
    with source.open() as stream:
        yield from read_elements(stream, source.name)


def read_elements(stream: BinaryIO, name: str) -> Iterator[tuple[int, bytes]]:
    """Yield the elements of an array, or the consecutive values of a file, numbered from 1."""
    chunks = chunks_between_escapes(stream)
    first = b""
    while not first.strip(BLANK):
        if not (first := next(chunks, b"")):
            return
    head = first.lstrip(BLANK)[:20]
    if head[:1] not in (b"[", b"{"):
        raise DataError(
            f"{name}: not JSON rows (begins with {head.decode('utf-8', 'replace')!r}); "
            "an array begins with [ and an object with {",
            code="not-json-rows",
        )
    if wrapper := WRAPPER.match(first):
        yield from ElementReader(name, is_array=True, is_wrapped=True).read(
            b"[" + first[wrapper.end() :], chunks
        )
    elif head.startswith(b"["):
        yield from ElementReader(name, is_array=True).read(first, chunks)
    else:
        yield from unwrap(ElementReader(name, is_array=False).read(first, chunks), name)


def unwrap(elements: Iterator[tuple[int, bytes]], name: str) -> Iterator[tuple[int, bytes]]:
    """Yield the rows of a single object that has them under a key; else the elements themselves."""
    first = next(elements, None)
    second = next(elements, None)
    if first is None:
        return
    rows = None if second else find_wrapped_rows(first[1], name)
    if rows is None:
        yield first
        if second:
            yield second
        yield from elements
    else:
        for number, row in enumerate(rows, 1):
            yield number, json.dumps(row).encode()


def find_wrapped_rows(text: bytes, name: str) -> list[Any] | None:
    """Return the rows under a known key of an object, or None."""
    if not any(b'"%s"' % key.encode() in text for key in WRAPPERS):
        return None
    try:
        row = parse_json(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    lists = {key: value for key, value in row.items() if is_rows(value)}
    key = next((key for key in WRAPPERS if key in lists), None)
    if key is None:
        return None
    warn_about_other_rows(name, tuple(other for other in lists if other != key))
    return lists[key]


def is_rows(value: Any) -> bool:
    """Return True if a value is a list of objects."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


@cache
def warn_about_other_rows(name: str, keys: tuple[str, ...]) -> None:
    """Warn once about further rows in a file, under other keys, that are not read."""
    if keys:
        others = " and ".join(map(json.dumps, keys))
        log_line(
            f"warning: {name}: rows under {others} are ignored; move them to a separate file to use them"
        )


def chunks_between_escapes(stream: BinaryIO) -> Iterator[bytes]:
    """Yield chunks that never end within an escape."""
    rest = b""
    while chunk := stream.read(CHUNK):
        chunk = rest + chunk
        odd = (len(chunk) - len(chunk.rstrip(b"\\"))) % 2
        rest = chunk[len(chunk) - odd :]
        if len(chunk) > odd:
            yield chunk[: len(chunk) - odd]
    if rest:
        yield rest


class ElementReader:
    """Cuts JSON into elements, and checks what is between them."""

    def __init__(self, name: str, is_array: bool, is_wrapped: bool = False) -> None:
        self.name = name
        self.is_array = is_array
        self.is_wrapped = is_wrapped  # in an object, which may have other keys
        self.count = 0
        self.pending = bytearray()  # the beginning of the current element

    def read(self, chunk: bytes, more: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
        """Yield the elements of a chunk and the following ones, numbered from 1."""
        scanner = Scanner()
        is_over = False
        if self.is_array:
            chunk = b"[" + chunk.lstrip(BLANK)[1:]
        begin = 1 if self.is_array else 0
        while chunk:
            for end in () if is_over else scanner.ends(chunk, int(self.is_array)):
                letter = chunk[end.offset : end.offset + 1]
                if self.is_array:
                    is_over = end.depth == 0
                    if end.depth < 0 or (letter == b",") == is_over or (is_over and letter != b"]"):
                        raise self.error(f"unexpected {letter.decode()!r}; check the brackets", "bad-array")
                    self.append(chunk[begin : end.offset])
                    if not is_over or self.pending.strip(BLANK) or self.count:
                        yield self.finish()
                elif letter != b",":
                    self.append(chunk[begin : end.offset + 1])
                    yield self.finish()
                else:
                    raise DataError(
                        f"{self.name}: a comma after element {self.count}, without an array around it; "
                        "put the objects in [ ]",
                        code="bad-array",
                    )
                begin = end.offset + 1
                if is_over:
                    if self.is_wrapped and (key := NEXT_KEY.match(chunk, begin)):
                        warn_about_other_rows(self.name, (key[1].decode("utf-8", "replace"),))
                    break
            if not (is_over and self.is_wrapped):
                self.append(chunk[begin:])
            if is_over and self.pending.strip(BLANK):
                rest = bytes(self.pending.strip(BLANK)[:20]).decode("utf-8", "replace")
                raise DataError(
                    f"{self.name}: the array of {self.count} elements is followed by {rest!r}; "
                    "a file must be one array",
                    code="bad-array",
                )
            chunk = next(more, b"")
            begin = 0
        if (self.is_array and not is_over) or self.pending.strip(BLANK):
            raise self.error("the file ends inside it; it was truncated or lacks a bracket", "truncated-file")
        if self.is_array and not self.count:
            raise DataError(f"{self.name}: the array is empty", code="no-rows")

    def append(self, piece: bytes) -> None:
        """Append bytes to the current element."""
        self.pending += piece
        if len(self.pending) > MAX_ELEMENT_BYTES:
            problem = f"longer than {MAX_ELEMENT_BYTES >> 20} MiB; a quote or a bracket may be missing"
            raise self.error(problem, "row-too-long")

    def finish(self) -> tuple[int, bytes]:
        """Return the finished element with its number."""
        text = bytes(self.pending.strip(BLANK))
        self.pending = bytearray()
        if not text:
            raise self.error("nothing between two commas, or after the last one", "bad-array")
        self.count += 1
        return self.count, text

    def error(self, problem: str, code: str) -> DataError:
        """Return a DataError that names the current element."""
        return DataError(f"{self.name}, element {self.count + 1}: {problem}", code=code)


def matches(first: bytes, following: bytes) -> bool:
    """Return True if the first lines begin like an array of objects."""
    return ARRAY.match(first + following) is not None


JSON = Format("json", (".json",), read_rows, unit="element", matches=matches)
