"""How a file becomes a wrong one: of GGUF by its structure, of JSON by its values, of any bytes by chance."""

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


def flipped(raw: bytes, chance: Random) -> bytes:
    """Some bytes are others, most of them near the beginning, where the structure is."""
    made = bytearray(raw)
    for _ in range(chance.choice([1, 1, 2, 4, 16])):
        if made:
            reach = len(made) if chance.random() < 0.3 else min(len(made), 6000)
            made[chance.randrange(reach)] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
    return bytes(made)


def cut(raw: bytes, chance: Random) -> bytes:
    return raw[: chance.randrange(len(raw) + 1)]


def inserted(raw: bytes, chance: Random) -> bytes:
    place = chance.randrange(len(raw) + 1)
    return raw[:place] + chance.choice(STRINGS) + chance.randbytes(chance.randrange(9)) + raw[place:]


def doubled(raw: bytes, chance: Random) -> bytes:
    """A piece is there again somewhere else."""
    one, other = sorted(chance.randrange(len(raw) + 1) for _ in range(2))
    place = chance.randrange(len(raw) + 1)
    return raw[:place] + raw[one : min(other, one + 5000)] + raw[place:]


def any_bytes(raw: bytes, chance: Random) -> bytes:
    return chance.choice([flipped, flipped, cut, inserted, doubled])(raw, chance)


# ---- GGUF ------------------------------------------------------------------


def scalar(kind: int, chance: Random) -> bytes:
    if kind in (6, 12):
        value = chance.choice([0.0, -1.0, float("nan"), float("inf"), 1e-30, 1e30, -0.0])
        return struct.pack("<f" if kind == 6 else "<d", value)
    if kind == STRING:
        return gguf.text(chance.choice(STRINGS))
    if kind == ARRAY:
        inner = chance.choice([0, 4, 5, 6, 7, 8, 9, 99])
        count = chance.choice([0, 1, 3])
        return struct.pack("<IQ", inner, count) + b"".join(
            scalar(inner, chance) if inner < 13 and inner != 9 else bytes(12) for _ in range(count)
        )
    return struct.pack("<Q", chance.choice(EXTREMES))[: gguf.SIZES.get(kind, 4)]


def change_value(entry: Entry, chance: Random) -> None:
    entry.raw = scalar(entry.kind, chance)


def change_kind(entry: Entry, chance: Random) -> None:
    """Another kind, and a value of it: an array where a word should be."""
    entry.kind = chance.choice([*gguf.SIZES, STRING, ARRAY, ARRAY, ARRAY])
    entry.raw = scalar(entry.kind, chance)


def lie_kind(entry: Entry, chance: Random) -> None:
    entry.kind = chance.choice([*gguf.SIZES, STRING, ARRAY, 13, 99, 2**32 - 1])


def lie_length(entry: Entry, chance: Random) -> None:
    place = 4 if entry.kind == ARRAY else 0
    if entry.kind in (ARRAY, STRING):
        entry.raw = entry.raw[:place] + struct.pack("<Q", chance.choice(EXTREMES)) + entry.raw[place + 8 :]


def change_item(entry: Entry, chance: Random) -> None:
    """One item of an array is another."""
    if entry.kind != ARRAY:
        change_value(entry, chance)
        return
    inner, count = struct.unpack_from("<IQ", entry.raw)
    items = items_of(entry.raw, inner, count)
    if items and inner in (*gguf.SIZES, STRING):
        for _ in range(chance.choice([1, 1, 5, len(items)])):
            items[chance.randrange(len(items))] = scalar(inner, chance)
    if chance.random() < 0.3:
        items = chance.choice([items[:-1], items + items[:1], items[::-1], [], items * 2])
    entry.raw = struct.pack("<IQ", inner, len(items)) + b"".join(items)


def items_of(raw: bytes, inner: int, count: int) -> list[bytes]:
    """Of what is right; none where an earlier change has made it something else."""
    cursor = gguf.Cursor(raw)
    cursor.place = 12
    try:
        return (
            [cursor.value(inner) for _ in range(count)]
            if inner in (*gguf.SIZES, STRING) and count <= len(raw)
            else []
        )
    except struct.error:
        return []


def change_key(entry: Entry, chance: Random) -> None:
    entry.key = chance.choice([*STRINGS, entry.key + b"x", entry.key.upper()])


def nest(entry: Entry, chance: Random) -> None:
    """Arrays in arrays."""
    depth = chance.choice([1, 2, 50, 1000, 100_000])
    entry.kind = ARRAY
    entry.raw = struct.pack("<IQ", ARRAY, 1) * depth + struct.pack("<IQ", U32, 0)


ENTRY = (change_value, change_kind, lie_kind, lie_length, change_item, change_item, change_key, nest)


def change_info(info: Info, chance: Random) -> None:
    """A tensor is said to be another."""
    what = chance.randrange(6)
    if what == 0:
        info.name = chance.choice([*STRINGS, info.name + b"x", b"token_embd.weight", b"x" * 65])
    elif what == 1 and info.axes:
        info.axes[chance.randrange(len(info.axes))] = chance.choice(EXTREMES)
    elif what == 2:
        info.axes = chance.choice([[], info.axes[::-1], [*info.axes, 1], info.axes[:1], [1] * 5, [2**32] * 3])
    elif what == 3:
        info.kind = chance.choice([*range(41), 99, 2**32 - 1])
    elif what == 4:
        info.offset = chance.choice([*EXTREMES, info.offset + 1, info.offset + 32])
    else:
        info.axes = [axis * 2 for axis in info.axes]


def change_parts(made: Parts, chance: Random) -> None:
    """Entries come, go and change places; counts and the version lie."""
    what = chance.randrange(8)
    if what == 0:
        made.counts = chance.choice(EXTREMES), len(made.entries)
    elif what == 1:
        made.counts = len(made.infos), chance.choice(EXTREMES)
    elif what == 2:
        made.version = chance.choice([0, 1, 2, 4, 2**24, 2**32 - 1])
    elif what == 3:
        made.data = chance.choice(
            [b"", made.data[: len(made.data) // 2], made.data + bytes(100), made.data[1:]]
        )
    elif what == 4 and made.infos:
        made.infos.append(made.infos[0]) if chance.random() < 0.5 else made.infos.pop(
            chance.randrange(len(made.infos))
        )
    elif what == 5 and made.infos:
        for info in made.infos:
            info.kind = chance.choice([0, 1, 2, 8, 12, 30])
    elif made.entries:
        one, other = (chance.choice(made.entries) for _ in range(2))
        if what == 6:
            made.entries.remove(one) if chance.random() < 0.7 else made.entries.append(one)
        else:
            one.kind, one.raw, other.kind, other.raw = other.kind, other.raw, one.kind, one.raw


def mutated(raw: bytes, chance: Random) -> bytes:
    """A GGUF file that is wrong in one place or a few."""
    if chance.random() < 0.15:
        return any_bytes(raw, chance)
    made = gguf.parse(raw)
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        where = chance.random()
        if where < 0.6 and made.entries:
            chance.choice(ENTRY)(chance.choice(made.entries), chance)
        elif where < 0.8 and made.infos:
            change_info(chance.choice(made.infos), chance)
        else:
            change_parts(made, chance)
    return made.packed()


# ---- JSON ------------------------------------------------------------------


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value))
        if isinstance(value, list)
        else []
    )
    return [path, *(each for key, item in inner for each in paths(item, (*path, key)))]


def changed_json(value: Any, chance: Random) -> Any:
    """One value, deep inside or not, is another or gone."""
    path = chance.choice(paths(value))
    if not path:
        return chance.choice(VALUES)
    made = json.loads(json.dumps(value))
    place = made
    for key in path[:-1]:
        place = place[key]
    what = chance.random()
    if what < 0.2:
        del place[path[-1]]
    elif what < 0.3 and isinstance(place, dict):
        place[chance.choice(["", "x", "role", "é" * 300])] = place.pop(path[-1])
    else:
        place[path[-1]] = chance.choice(VALUES)
    return made


def as_json(value: Any, chance: Random) -> bytes:
    text = json.dumps(value, ensure_ascii=chance.random() < 0.5)
    made = text.encode("utf-8", "surrogatepass")
    return any_bytes(made, chance) if chance.random() < 0.2 else made
