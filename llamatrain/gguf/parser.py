"""Walks through the head of a GGUF file: what the file says is believed only as far as the file's own size bears it out."""

from typing import Any

import numpy as np

from llamatrain.errors import FileError
from llamatrain.gguf.values import ARRAY, DTYPES, LENGTH, U32, Kind
from llamatrain.io.mapped_file import MappedFile

KINDS = {kind.value: kind for kind in Kind}
NAME_LIMIT = 65535  # bytes of a key or a tensor's name
NESTING_LIMIT = 4  # arrays in arrays
CHUNK_BYTES = 1 << 18  # bytes that are read at a time
MAX_HEAD_BYTES = 1 << 28  # bytes of a head: that of a vocabulary of 256,000 tokens has a twentieth of it
LEAP_BYTES = 1 << 15  # bytes that `leap` looks at: its arrays stay in the cache
MIN_LEAP = 512  # strings, at least, for each leap: where leaps are short, plain steps are faster


def shorten(text: str) -> str:
    """Not more of it than a line of words has room for."""
    return text if len(text) <= 64 else f"{text[:61]}..."


def quote(name: str) -> str:
    """A name from a file, safe to print and not too long."""
    return ascii(shorten(name))


class Cursor:
    """Reads the file on as far as it goes, each byte once: what was checked is what is used, whatever becomes of the file."""

    def __init__(self, file: MappedFile) -> None:
        self.file, self.path, self.size = file, file.path, len(file)
        self.data: Any = bytearray()  # what was read so far
        self.offset = 0
        self.context = "the header"

    def error(self, problem: str) -> FileError:
        return FileError(f"{self.path}: {self.context}, at byte {self.offset}: {problem}")

    def advance(self, count: int) -> int:
        """Pass so many bytes, which the file must have; where they begin."""
        start, left = self.offset, self.size - self.offset
        if count > left:
            raise self.error(f"{count} bytes should follow, but the file has {left} more")
        self.offset += count
        self.read_to(self.offset)
        return start

    def bytes_since(self, start: int) -> bytes:
        """What was passed from a byte on."""
        return bytes(memoryview(self.data)[start : self.offset])

    def first_bytes(self, count: int) -> bytes:
        """The first bytes, of which there may be fewer."""
        return self.bytes_since(self.advance(min(count, self.size)))

    def read_to(self, end: int) -> None:
        """Have the bytes up to there."""
        if end > MAX_HEAD_BYTES:
            raise self.error(
                f"up to {MAX_HEAD_BYTES} bytes can be before the tensors' data, and here are more"
            )
        while (size := len(self.data)) < end:
            chunk = self.file.read_bytes(size, min(max(CHUNK_BYTES, end - size), self.size - size))
            if not chunk:
                raise self.error("the file ends here by now")
            self.data += chunk

    def read_u32(self) -> int:
        return U32.unpack_from(self.data, self.advance(U32.size))[0]

    def read_u64(self) -> int:
        return LENGTH.unpack_from(self.data, self.advance(LENGTH.size))[0]

    def read_count(self, min_bytes: int) -> int:
        """A number of things, of which each takes so many bytes or more."""
        count, left = self.read_u64(), self.size - self.offset
        if count * min_bytes > left:
            raise self.error(
                f"{count} of them should follow, {min_bytes} bytes or more each, but the file has {left} more"
            )
        return count

    def read_name(self) -> str:
        length = self.read_u64()
        if not 0 < length <= NAME_LIMIT:
            raise self.error(f"a name of {length} bytes; 1 to {NAME_LIMIT} can be")
        start = self.advance(length)
        return str(self.bytes_since(start), "utf-8", "surrogateescape")

    def read_kind(self) -> Kind:
        number = self.read_u32()
        if number not in KINDS:
            raise self.error(f"a value of kind {number}; known are 0 to {max(KINDS)}")
        return KINDS[number]

    # ---- passing values, without decoding them ----

    def skip(self, kind: Kind, depth: int = 0) -> None:
        if kind is Kind.STRING:
            self.advance(self.read_u64())
        elif kind is Kind.ARRAY:
            self.skip_array(depth + 1)
        else:
            self.advance(DTYPES[kind].itemsize)

    def skip_array(self, depth: int) -> None:
        if depth > NESTING_LIMIT:
            raise self.error(f"arrays in arrays, more than {NESTING_LIMIT} deep")
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
        """Pass strings: as a vocabulary may have some 100,000 of them, many at a time."""
        while left:
            passed = self.skip_short_strings(left) if left > MIN_LEAP else 0
            steps = min(left - passed, max(1, MIN_LEAP - passed))
            self.skip_strings_singly(steps)
            left -= passed + steps

    def skip_strings_singly(self, count: int) -> None:
        """Pass so many strings one by one: `take(u64())`, without its calls."""
        data, offset, there, length_at = self.data, self.offset, len(self.data), LENGTH.unpack_from
        for _ in range(count):
            end = offset + LENGTH.size
            if end > there or (end := end + length_at(data, offset)[0]) > there:
                self.offset = offset
                self.advance(self.read_u64())  # reads on, or fails and says why
                end, there = self.offset, len(data)
            offset = end
        self.offset = offset

    def skip_short_strings(self, left: int) -> int:
        """Pass all strings up to the first whose length looks unlike that of a short one; how many they were.

        A length under 256 is a byte with seven zeros behind it. Such places are found all at once; as long as each string
        ends where the next place is, the places are lengths indeed.
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
