"""Walks through the head of a GGUF file: what the file says is believed only as far as the file's own size bears it out."""

from typing import Any

import numpy as np

from llamatrain.errors import FileError
from llamatrain.gguf.values import ARRAY, DTYPES, LENGTH, U32, Kind
from llamatrain.io.mapped_file import MappedFile

KINDS = {kind.value: kind for kind in Kind}
NAME_LIMIT = 65535  # bytes of a key or a tensor's name
NESTING_LIMIT = 4  # arrays in arrays
PIECE = 1 << 18  # bytes that are read at a time
LARGEST = 1 << 28  # bytes of a head: that of a vocabulary of 256,000 tokens has a twentieth of it
BLOCK = 1 << 15  # bytes that `leap` looks at: its arrays stay in the cache
STRIDE = 512  # strings, at least, for each leap: where leaps are short, plain steps are faster


def cut(text: str) -> str:
    """Not more of it than a line of words has room for."""
    return text if len(text) <= 64 else f"{text[:61]}..."


def quoted(name: str) -> str:
    """A name from a file, safe to print and not too long."""
    return ascii(cut(name))


class Cursor:
    """Reads the file on as far as it goes, each byte once: what was checked is what is used, whatever becomes of the file."""

    def __init__(self, file: MappedFile) -> None:
        self.file, self.path, self.size = file, file.path, len(file)
        self.data: Any = bytearray()  # what was read so far
        self.at = 0
        self.reading = "the header"

    def fail(self, problem: str) -> FileError:
        return FileError(f"{self.path}: {self.reading}, at byte {self.at}: {problem}")

    def take(self, count: int) -> int:
        """Pass so many bytes, which the file must have; where they begin."""
        start, left = self.at, self.size - self.at
        if count > left:
            raise self.fail(f"{count} bytes should follow, but the file has {left} more")
        self.at += count
        self.reach(self.at)
        return start

    def since(self, start: int) -> bytes:
        """What was passed from a byte on."""
        return bytes(memoryview(self.data)[start : self.at])

    def first(self, count: int) -> bytes:
        """The first bytes, of which there may be fewer."""
        return self.since(self.take(min(count, self.size)))

    def reach(self, end: int) -> None:
        """Have the bytes up to there."""
        if end > LARGEST:
            raise self.fail(f"up to {LARGEST} bytes can be before the tensors' data, and here are more")
        while (there := len(self.data)) < end:
            piece = self.file.read_bytes(there, min(max(PIECE, end - there), self.size - there))
            if not piece:
                raise self.fail("the file ends here by now")
            self.data += piece

    def u32(self) -> int:
        return U32.unpack_from(self.data, self.take(U32.size))[0]

    def u64(self) -> int:
        return LENGTH.unpack_from(self.data, self.take(LENGTH.size))[0]

    def count(self, smallest: int) -> int:
        """A number of things, of which each takes so many bytes or more."""
        count, left = self.u64(), self.size - self.at
        if count * smallest > left:
            raise self.fail(
                f"{count} of them should follow, {smallest} bytes or more each, but the file has {left} more"
            )
        return count

    def name(self) -> str:
        length = self.u64()
        if not 0 < length <= NAME_LIMIT:
            raise self.fail(f"a name of {length} bytes; 1 to {NAME_LIMIT} can be")
        start = self.take(length)
        return str(self.since(start), "utf-8", "surrogateescape")

    def kind(self) -> Kind:
        number = self.u32()
        if number not in KINDS:
            raise self.fail(f"a value of kind {number}; known are 0 to {max(KINDS)}")
        return KINDS[number]

    # ---- passing values, without decoding them ----

    def skip(self, kind: Kind, depth: int = 0) -> None:
        if kind is Kind.STRING:
            self.take(self.u64())
        elif kind is Kind.ARRAY:
            self.skip_array(depth + 1)
        else:
            self.take(DTYPES[kind].itemsize)

    def skip_array(self, depth: int) -> None:
        if depth > NESTING_LIMIT:
            raise self.fail(f"arrays in arrays, more than {NESTING_LIMIT} deep")
        kind = self.kind()
        if kind is Kind.STRING:
            self.skip_strings(self.count(LENGTH.size))
        elif kind is Kind.ARRAY:
            for _ in range(self.count(ARRAY.size)):
                self.skip_array(depth + 1)
        else:
            size = DTYPES[kind].itemsize
            self.take(self.count(size) * size)

    def skip_strings(self, left: int) -> None:
        """Pass strings: as a vocabulary may have some 100,000 of them, many at a time."""
        while left:
            passed = self.leap(left) if left > STRIDE else 0
            steps = min(left - passed, max(1, STRIDE - passed))
            self.step(steps)
            left -= passed + steps

    def step(self, count: int) -> None:
        """Pass so many strings one by one: `take(u64())`, without its calls."""
        data, at, there, length_at = self.data, self.at, len(self.data), LENGTH.unpack_from
        for _ in range(count):
            behind = at + LENGTH.size
            if behind > there or (behind := behind + length_at(data, at)[0]) > there:
                self.at = at
                self.take(self.u64())  # reads on, or fails and says why
                behind, there = self.at, len(data)
            at = behind
        self.at = at

    def leap(self, left: int) -> int:
        """Pass all strings up to the first whose length looks unlike that of a short one; how many they were.

        A length under 256 is a byte with seven zeros behind it. Such places are found all at once; as long as each string
        ends where the next place is, the places are lengths indeed.
        """
        self.reach(min(self.at + BLOCK, self.size, LARGEST))
        block = np.frombuffer(self.data, np.uint8, min(BLOCK, len(self.data) - self.at), self.at)
        zero = block == 0
        two = zero[1:-1] & zero[2:]  # [i]: bytes i + 1 and i + 2 are zero
        four = two[:-2] & two[2:]
        places = np.flatnonzero(four[:-3] & four[3:])
        if not len(places) or places[0] != 0:
            return 0
        ends = places + block[places] + LENGTH.size
        gaps = np.flatnonzero(ends[:-1] != places[1:])
        passed = min(left, int(gaps[0]) if len(gaps) else len(places) - 1)
        if passed:
            self.at += int(ends[passed - 1])
        return passed
