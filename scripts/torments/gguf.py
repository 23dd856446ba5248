"""GGUF files in parts that can be changed one by one, however wrong they are then."""

import struct
from dataclasses import dataclass, field

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of each kind of number
U32, STRING, ARRAY = 4, 8, 9
ALIGNMENT = 32


def text(words: str | bytes) -> bytes:
    raw = words.encode() if isinstance(words, str) else words
    return struct.pack("<Q", len(raw)) + raw


@dataclass
class Entry:
    key: bytes
    kind: int
    raw: bytes


@dataclass
class Info:
    name: bytes
    axes: list[int]
    kind: int
    offset: int


@dataclass
class Parts:
    entries: list[Entry] = field(default_factory=list)
    infos: list[Info] = field(default_factory=list)
    data: bytes = b""
    version: int = 3
    counts: tuple[int, int] | None = None  # of tensors and keys, where the file is to lie

    def packed(self) -> bytes:
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
    def __init__(self, raw: bytes) -> None:
        self.raw, self.place = raw, 0

    def number(self, letter: str) -> int:
        size = struct.calcsize(f"<{letter}")
        self.place += size
        return int(struct.unpack_from(f"<{letter}", self.raw, self.place - size)[0])

    def words(self) -> bytes:
        size = self.number("Q")
        self.place += size
        return self.raw[self.place - size : self.place]

    def value(self, kind: int) -> bytes:
        begin = self.place
        if kind == STRING:
            self.words()
        elif kind == ARRAY:
            inner, count = self.number("I"), self.number("Q")
            if inner in SIZES:
                self.place += SIZES[inner] * count
            else:
                for _ in range(count):
                    self.value(inner)
        else:
            self.place += SIZES[kind]
        return self.raw[begin : self.place]


def parse(raw: bytes) -> Parts:
    """Of a file that is right."""
    cursor = Cursor(raw)
    cursor.place = 4
    version, tensors, keys = cursor.number("I"), cursor.number("Q"), cursor.number("Q")
    made = Parts(version=version)
    for _ in range(keys):
        key, kind = cursor.words(), cursor.number("I")
        made.entries.append(Entry(key, kind, cursor.value(kind)))
    for _ in range(tensors):
        name, dimensions = cursor.words(), cursor.number("I")
        axes = [cursor.number("Q") for _ in range(dimensions)]
        made.infos.append(Info(name, axes, cursor.number("I"), cursor.number("Q")))
    made.data = raw[-(-cursor.place // ALIGNMENT) * ALIGNMENT :]
    return made
