"""Mutates files: GGUF by its structure, JSON by its values, and any bytes at random."""

import json
import struct
from collections.abc import Callable
from random import Random
from typing import Any

from torments import gguf
from torments.gguf import ARRAY, STRING, U32, Entry, Info, Parts

EXTREMES = (
    0,
    1,
    2,
    7,
    31,
    2**15,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**40,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
STRINGS = (
    b"",
    b"\0",
    b"\xff\xfe",
    "ü\u202e".encode(),
    b"%s{}",
    b"../../x",
    b"/dev/zero",
    b"x" * 5000,
    b"<0xZZ>",
    b"<0x41>",
    b"\n\n",
    b" ",
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1e308,
    -0.0,
    float("nan"),
    float("inf"),
    2**63,
    10**400,
    "",
    "x",
    "x" * 5000,
    "\ud800",
    [],
    {},
    [[]],
    ["x"],
    {"x": 1},
)
NUMBERS = (
    *[
        "0",
        "-1",
        "1",
        "-0",
        "1e308",
        "1e-308",
        "nan",
        "inf",
        "-inf",
        "1e400",
        "2147483648",
        "9223372036854775808",
        "0.5",
        "abc",
        "1_0",
        "٣",
        "0x10",
        "1e3",
        "-1e-9",
        "4096",
        "65536",
    ],
    "9" * 30,
    "9" * 5000,
    "",
    " ",
    "\t",
)
Raw = Callable[[bytes, Random], bytes]


# ---- bytes -----------------------------------------------------------------


def flip_bytes(raw: bytes, rng: Random) -> bytes:
    """Change some bytes, most of them near the beginning, where the structure is."""
    parts = bytearray(raw)
    for _ in range(rng.choice([1, 1, 2, 4, 16])):
        if parts:
            reach = len(parts) if rng.random() < 0.3 else min(len(parts), 6000)
            parts[rng.randrange(reach)] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
    return bytes(parts)


def cut_bytes(raw: bytes, rng: Random) -> bytes:
    """Cut the end."""
    return raw[: rng.randrange(len(raw) + 1)]


def insert_bytes(raw: bytes, rng: Random) -> bytes:
    """Insert a string and random bytes."""
    offset = rng.randrange(len(raw) + 1)
    return raw[:offset] + rng.choice(STRINGS) + rng.randbytes(rng.randrange(9)) + raw[offset:]


def repeat_bytes(raw: bytes, rng: Random) -> bytes:
    """Insert a copy of one piece at another place."""
    one, other = sorted(rng.randrange(len(raw) + 1) for _ in range(2))
    offset = rng.randrange(len(raw) + 1)
    return raw[:offset] + raw[one : min(other, one + 5000)] + raw[offset:]


def mutate_bytes(raw: bytes, rng: Random) -> bytes:
    """Mutate bytes in one of several ways."""
    return rng.choice([flip_bytes, flip_bytes, cut_bytes, insert_bytes, repeat_bytes])(raw, rng)


# ---- GGUF ------------------------------------------------------------------


def random_value(kind: int, rng: Random) -> bytes:
    """Return the bytes of an extreme value of a GGUF type."""
    if kind in (6, 12):
        value = rng.choice([0.0, -1.0, float("nan"), float("inf"), 1e-30, 1e30, -0.0])
        return struct.pack("<f" if kind == 6 else "<d", value)
    if kind == STRING:
        return gguf.text(rng.choice(STRINGS))
    if kind == ARRAY:
        inner = rng.choice([0, 4, 5, 6, 7, 8, 9, 99])
        count = rng.choice([0, 1, 3])
        return struct.pack("<IQ", inner, count) + b"".join(
            random_value(inner, rng) if inner < 13 and inner != 9 else bytes(12) for _ in range(count)
        )
    return struct.pack("<Q", rng.choice(EXTREMES))[: gguf.SIZES.get(kind, 4)]


def change_value(entry: Entry, rng: Random) -> None:
    """Replace the value."""
    entry.raw = random_value(entry.kind, rng)


def change_kind(entry: Entry, rng: Random) -> None:
    """Replace the type and the value, often by an array."""
    entry.kind = rng.choice([*gguf.SIZES, STRING, ARRAY, ARRAY, ARRAY])
    entry.raw = random_value(entry.kind, rng)


def lie_kind(entry: Entry, rng: Random) -> None:
    """Replace the type, but not the value."""
    entry.kind = rng.choice([*gguf.SIZES, STRING, ARRAY, 13, 99, 2**32 - 1])


def lie_length(entry: Entry, rng: Random) -> None:
    """Replace the length of an array or a string."""
    offset = 4 if entry.kind == ARRAY else 0
    if entry.kind in (ARRAY, STRING):
        entry.raw = entry.raw[:offset] + struct.pack("<Q", rng.choice(EXTREMES)) + entry.raw[offset + 8 :]


def change_item(entry: Entry, rng: Random) -> None:
    """Replace, remove or repeat items of an array."""
    if entry.kind != ARRAY:
        change_value(entry, rng)
        return
    inner, count = struct.unpack_from("<IQ", entry.raw)
    items = split_items(entry.raw, inner, count)
    if items and inner in (*gguf.SIZES, STRING):
        for _ in range(rng.choice([1, 1, 5, len(items)])):
            items[rng.randrange(len(items))] = random_value(inner, rng)
    if rng.random() < 0.3:
        items = rng.choice([items[:-1], items + items[:1], items[::-1], [], items * 2])
    entry.raw = struct.pack("<IQ", inner, len(items)) + b"".join(items)


def split_items(raw: bytes, inner: int, count: int) -> list[bytes]:
    """Return the items of a valid array; an empty list if an earlier change has broken it."""
    cursor = gguf.Cursor(raw)
    cursor.offset = 12
    try:
        return (
            [cursor.value(inner) for _ in range(count)]
            if inner in (*gguf.SIZES, STRING) and count <= len(raw)
            else []
        )
    except struct.error:
        return []


def change_key(entry: Entry, rng: Random) -> None:
    """Replace the key."""
    entry.key = rng.choice([*STRINGS, entry.key + b"x", entry.key.upper()])


def nest_arrays(entry: Entry, rng: Random) -> None:
    """Nest arrays in arrays."""
    depth = rng.choice([1, 2, 50, 1000, 100_000])
    entry.kind = ARRAY
    entry.raw = struct.pack("<IQ", ARRAY, 1) * depth + struct.pack("<IQ", U32, 0)


ENTRY = (change_value, change_kind, lie_kind, lie_length, change_item, change_item, change_key, nest_arrays)


def change_info(info: Info, rng: Random) -> None:
    """Change the description of a tensor."""
    what = rng.randrange(6)
    if what == 0:
        info.name = rng.choice([*STRINGS, info.name + b"x", b"token_embd.weight", b"x" * 65])
    elif what == 1 and info.axes:
        info.axes[rng.randrange(len(info.axes))] = rng.choice(EXTREMES)
    elif what == 2:
        info.axes = rng.choice([[], info.axes[::-1], [*info.axes, 1], info.axes[:1], [1] * 5, [2**32] * 3])
    elif what == 3:
        info.kind = rng.choice([*range(41), 99, 2**32 - 1])
    elif what == 4:
        info.offset = rng.choice([*EXTREMES, info.offset + 1, info.offset + 32])
    else:
        info.axes = [axis * 2 for axis in info.axes]


def change_structure(parts: Parts, rng: Random) -> None:
    """Add, remove or swap entries, or change counts and the version."""
    what = rng.randrange(8)
    if what == 0:
        parts.counts = rng.choice(EXTREMES), len(parts.entries)
    elif what == 1:
        parts.counts = len(parts.infos), rng.choice(EXTREMES)
    elif what == 2:
        parts.version = rng.choice([0, 1, 2, 4, 2**24, 2**32 - 1])
    elif what == 3:
        parts.data = rng.choice(
            [b"", parts.data[: len(parts.data) // 2], parts.data + bytes(100), parts.data[1:]]
        )
    elif what == 4 and parts.infos:
        parts.infos.append(parts.infos[0]) if rng.random() < 0.5 else parts.infos.pop(
            rng.randrange(len(parts.infos))
        )
    elif what == 5 and parts.infos:
        for info in parts.infos:
            info.kind = rng.choice([0, 1, 2, 8, 12, 30])
    elif parts.entries:
        one, other = (rng.choice(parts.entries) for _ in range(2))
        if what == 6:
            parts.entries.remove(one) if rng.random() < 0.7 else parts.entries.append(one)
        else:
            one.kind, one.raw, other.kind, other.raw = other.kind, other.raw, one.kind, one.raw


def mutate_gguf(raw: bytes, rng: Random) -> bytes:
    """Mutate a GGUF file in one place or a few."""
    if rng.random() < 0.15:
        return mutate_bytes(raw, rng)
    parts = gguf.parse(raw)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        where = rng.random()
        if where < 0.6 and parts.entries:
            rng.choice(ENTRY)(rng.choice(parts.entries), rng)
        elif where < 0.8 and parts.infos:
            change_info(rng.choice(parts.infos), rng)
        else:
            change_structure(parts, rng)
    return parts.pack()


# ---- JSON ------------------------------------------------------------------


def list_paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to all values in JSON."""
    inner = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value))
        if isinstance(value, list)
        else []
    )
    return [path, *(deeper for key, item in inner for deeper in list_paths(item, (*path, key)))]


def change_json(value: Any, rng: Random) -> Any:
    """Replace, remove or rename a value at a random path."""
    path = rng.choice(list_paths(value))
    if not path:
        return rng.choice(VALUES)
    parts = json.loads(json.dumps(value))
    offset = parts
    for key in path[:-1]:
        offset = offset[key]
    what = rng.random()
    if what < 0.2:
        del offset[path[-1]]
    elif what < 0.3 and isinstance(offset, dict):
        offset[rng.choice(["", "x", "role", "é" * 300])] = offset.pop(path[-1])
    else:
        offset[path[-1]] = rng.choice(VALUES)
    return parts


def encode_json(value: Any, rng: Random) -> bytes:
    """Return JSON as bytes, sometimes mutated."""
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    parts = text.encode("utf-8", "surrogatepass")
    return mutate_bytes(parts, rng) if rng.random() < 0.2 else parts
