"""Parses the head of a GGUF file. Each length and count is checked against the size of the file."""

from typing import Any

import numpy as np

from llamatrain.errors import FileError
from llamatrain.gguf.values import ARRAY, DTYPES, LENGTH, U32, Kind
from llamatrain.io.mapped_file import MappedFile

KINDS = {kind.value: kind for kind in Kind}
NAME_LIMIT = 65535  # bytes of a key or a tensor's name
NESTING_LIMIT = 4  # arrays in arrays
CHUNK_BYTES = 1 << 18  # bytes that are read at a time
MAX_HEAD_BYTES = 1 << 28  # bytes of a head; a vocabulary of 256,000 tokens needs a twentieth of it
LEAP_BYTES = 1 << 15  # bytes that skip_short_strings scans; its arrays fit in the cache
MIN_LEAP = 512  # the fewest strings to skip at once; below, single steps are faster


def shorten(text: str) -> str:
    """Shorten a text to 64 characters."""
    return text if len(text) <= 64 else f"{text[:61]}..."


def quote(name: str) -> str:
    """Return a name from a file, quoted, escaped and shortened, for use in a message."""
    return ascii(shorten(name))


class Cursor:
    """Reads a file from its beginning, each byte once.

    What was checked is what is used, whatever happens to the file meanwhile.
    """

    def __init__(self, file: MappedFile) -> None:
        self.file, self.path, self.size = file, file.path, len(file)
        self.data: Any = bytearray()  # what was read so far
        self.offset = 0
        self.context = "the header"

    def error(self, problem: str, *, code: str = "invalid-gguf") -> FileError:
        """Return a FileError with the path, the part being read, and the offset."""
        return FileError(f"{self.path}: {self.context}, at byte {self.offset}: {problem}", code=code)

    def advance(self, count: int) -> int:
        """Skip `count` bytes, which the file must have, and return the offset of the first."""
        start, left = self.offset, self.size - self.offset
        if count > left:
            raise self.error(
                f"{count} bytes should follow, but the file has only {left} more", code="truncated-file"
            )
        self.offset += count
        self.read_to(self.offset)
        return start

    def bytes_since(self, start: int) -> bytes:
        """Return the bytes from `start` to the current offset."""
        return bytes(memoryview(self.data)[start : self.offset])

    def first_bytes(self, count: int) -> bytes:
        """Return the first `count` bytes, or fewer if the file is shorter."""
        return self.bytes_since(self.advance(min(count, self.size)))

    def read_to(self, end: int) -> None:
        """Read the file up to the offset `end`."""
        if end > MAX_HEAD_BYTES:
            raise self.error(f"the head is longer than {MAX_HEAD_BYTES} bytes")
        while (size := len(self.data)) < end:
            chunk = self.file.read_bytes(size, min(max(CHUNK_BYTES, end - size), self.size - size))
            if not chunk:
                raise self.error("the file was truncated here", code="truncated-file")
            self.data += chunk

    def read_u32(self) -> int:
        """Read an unsigned 32-bit integer."""
        return U32.unpack_from(self.data, self.advance(U32.size))[0]

    def read_u64(self) -> int:
        """Read an unsigned 64-bit integer."""
        return LENGTH.unpack_from(self.data, self.advance(LENGTH.size))[0]

    def read_count(self, min_bytes: int) -> int:
        """Read the number of items that follow, each of at least `min_bytes` bytes."""
        count, left = self.read_u64(), self.size - self.offset
        if count * min_bytes > left:
            raise self.error(
                f"{count} items of {min_bytes} bytes or more should follow, but the file has only {left} more",
                code="truncated-file",
            )
        return count

    def read_name(self) -> str:
        """Read the name of a key or tensor."""
        length = self.read_u64()
        if not 0 < length <= NAME_LIMIT:
            raise self.error(f"the length of a name must be 1 to {NAME_LIMIT} bytes (got {length})")
        start = self.advance(length)
        return str(self.bytes_since(start), "utf-8", "surrogateescape")

    def read_kind(self) -> Kind:
        """Read the type of a value."""
        number = self.read_u32()
        if number not in KINDS:
            raise self.error(f"unknown value type {number}; known are 0 to {max(KINDS)}")
        return KINDS[number]

    # ---- passing values, without decoding them ----

    def skip(self, kind: Kind, depth: int = 0) -> None:
        """Skip a value of a kind without decoding it."""
        if kind is Kind.STRING:
            self.advance(self.read_u64())
        elif kind is Kind.ARRAY:
            self.skip_array(depth + 1)
        else:
            self.advance(DTYPES[kind].itemsize)

    def skip_array(self, depth: int) -> None:
        """Skip an array, with the type and count before its items."""
        if depth > NESTING_LIMIT:
            raise self.error(f"arrays are nested more than {NESTING_LIMIT} deep")
        kind = self.read_kind()
        if kind is Kind.STRING:
            self.skip_strings(self.read_count(LENGTH.size))
        elif kind is Kind.ARRAY:
            for _ in range(self.read_count(ARRAY.size)):
                self.skip_array(depth + 1)
        else:
            size = DTYPES[kind].itemsize
            self.advance(self.read_count(size) * size)

    def skip_strings(self, left: int) -> None:
        """Skip `left` strings. A vocabulary may have 100,000 of them, so they are skipped in bulk."""
        while left:
            passed = self.skip_short_strings(left) if left > MIN_LEAP else 0
            steps = min(left - passed, max(1, MIN_LEAP - passed))
            self.skip_strings_singly(steps)
            left -= passed + steps

    def skip_strings_singly(self, count: int) -> None:
        """Skip `count` strings one by one: `advance(read_u64())` without the calls."""
        data, offset, there, length_at = self.data, self.offset, len(self.data), LENGTH.unpack_from
        for _ in range(count):
            end = offset + LENGTH.size
            if end > there or (end := end + length_at(data, offset)[0]) > there:
                self.offset = offset
                self.advance(self.read_u64())  # reads on, or raises an error
                end, there = self.offset, len(data)
            offset = end
        self.offset = offset

    def skip_short_strings(self, left: int) -> int:
        """Skip all strings before the first that may be longer than 255 bytes, and return their number.

        A length below 256 is a byte followed by seven zeros. All such offsets are found at once. As long as
        each string ends where the next such offset is, the offsets are lengths indeed.
        """
        self.read_to(min(self.offset + LEAP_BYTES, self.size, MAX_HEAD_BYTES))
        block = np.frombuffer(self.data, np.uint8, min(LEAP_BYTES, len(self.data) - self.offset), self.offset)
        zero = block == 0
        two = zero[1:-1] & zero[2:]  # [i]: bytes i + 1 and i + 2 are zero
        four = two[:-2] & two[2:]
        starts = np.flatnonzero(four[:-3] & four[3:])
        if not len(starts) or starts[0] != 0:
            return 0
        ends = starts + block[starts] + LENGTH.size
        gaps = np.flatnonzero(ends[:-1] != starts[1:])
        passed = min(left, int(gaps[0]) if len(gaps) else len(starts) - 1)
        if passed:
            self.offset += int(ends[passed - 1])
        return passed
