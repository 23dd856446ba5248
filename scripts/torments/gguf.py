"""GGUF files in parts that can be changed one by one and packed again, valid or not."""

import struct
from dataclasses import dataclass, field

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of each kind of number
U32, STRING, ARRAY = 4, 8, 9
ALIGNMENT = 32


def text(words: str | bytes) -> bytes:
    """Return a string with its length in front."""
    raw = words.encode() if isinstance(words, str) else words
    return struct.pack("<Q", len(raw)) + raw


@dataclass
class Entry:
    """A metadata entry: its key, the number of its type, and its bytes."""

    key: bytes
    kind: int
    raw: bytes


@dataclass
class Info:
    """The description of a tensor."""

    name: bytes
    axes: list[int]
    kind: int
    offset: int


@dataclass
class Parts:
    """The parts of a file."""

    entries: list[Entry] = field(default_factory=list)
    infos: list[Info] = field(default_factory=list)
    data: bytes = b""
    version: int = 3
    counts: tuple[int, int] | None = None  # of tensors and keys, where the file is to lie

    def pack(self) -> bytes:
        """Return the bytes of the file."""
        counts = self.counts or (len(self.infos), len(self.entries))
        raw = b"GGUF" + struct.pack("<IQQ", self.version, *(count % 2**64 for count in counts))
        for entry in self.entries:
            raw += text(entry.key) + struct.pack("<I", entry.kind % 2**32) + entry.raw
        for info in self.infos:
            axes = b"".join(struct.pack("<Q", axis % 2**64) for axis in info.axes)
            raw += text(info.name) + struct.pack("<I", len(info.axes)) + axes
            raw += struct.pack("<IQ", info.kind % 2**32, info.offset % 2**64)
        return raw + bytes(-len(raw) % ALIGNMENT) + self.data


class Cursor:
    """Reads values from bytes, one after the other."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.offset = raw, 0

    def number(self, letter: str) -> int:
        """Read a number in a format of `struct`."""
        size = struct.calcsize(f"<{letter}")
        self.offset += size
        return int(struct.unpack_from(f"<{letter}", self.raw, self.offset - size)[0])

    def words(self) -> bytes:
        """Read a string."""
        size = self.number("Q")
        self.offset += size
        return self.raw[self.offset - size : self.offset]

    def value(self, kind: int) -> bytes:
        """Skip a value of a type and return its bytes."""
        start = self.offset
        if kind == STRING:
            self.words()
        elif kind == ARRAY:
            inner, count = self.number("I"), self.number("Q")
            if inner in SIZES:
                self.offset += SIZES[inner] * count
            else:
                for _ in range(count):
                    self.value(inner)
        else:
            self.offset += SIZES[kind]
        return self.raw[start : self.offset]


def parse(raw: bytes) -> Parts:
    """Split a valid file into its parts."""
    cursor = Cursor(raw)
    cursor.offset = 4
    version, tensors, keys = cursor.number("I"), cursor.number("Q"), cursor.number("Q")
    parts = Parts(version=version)
    for _ in range(keys):
        key, kind = cursor.words(), cursor.number("I")
        parts.entries.append(Entry(key, kind, cursor.value(kind)))
    for _ in range(tensors):
        name, dimensions = cursor.words(), cursor.number("I")
        axes = [cursor.number("Q") for _ in range(dimensions)]
        parts.infos.append(Info(name, axes, cursor.number("I"), cursor.number("Q")))
    parts.data = raw[-(-cursor.offset // ALIGNMENT) * ALIGNMENT :]
    return parts
