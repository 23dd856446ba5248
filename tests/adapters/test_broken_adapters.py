"""Broken and hostile adapters of each kind: an error in one line that names the file, at once and in little memory."""

import json
import random
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain.adapters import gguf, peft
from llamatrain.adapters.adapter import Adapter, check_fits
from llamatrain.adapters.read import read_adapter
from llamatrain.errors import FileError
from llamatrain.gguf.safetensors import MAX_HEADER, open_safetensors
from tests.gguf.test_broken_files import HUGE, little_memory
from tests.helpers.adapter_files import adapter, ggla
from tests.helpers.small_models import EMBEDDINGS, small

__all__ = ["little_memory"]  # a fixture

H = small(embd=32, heads=2, kv_heads=1, head_size=16, layers=1, vocab=20)
NAMES = (EMBEDDINGS, "blk.0.attn_q.weight")


def broken(data: bytes, step: int) -> Iterator[bytes]:
    """Cut, with huge numbers in it, with bits flipped, with pieces moved; most of it in the head."""
    rng = random.Random(5)
    head = min(len(data), 700)
    for length in (*range(0, head, step), len(data) - 1):
        yield data[:length]
    for place in range(0, head - 8, step):
        number = rng.choice(HUGE)
        yield data[:place] + number.to_bytes(8, "little") + data[place + 8 :]
        yield data[:place] + (number & 0xFFFFFFFF).to_bytes(4, "little") + data[place + 4 :]
    for _ in range(500):
        flipped = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            flipped[rng.randrange(head)] ^= 1 << rng.randrange(8)
        yield bytes(flipped)
    for _ in range(150):
        a, b, c, d = (rng.randrange(head) for _ in range(4))
        yield data[:a] + data[min(b, c) : max(b, c)] + data[d:]


def broken_json(data: dict[str, Any]) -> Iterator[bytes]:
    """Each value by another one, and text that is no JSON."""
    odd: tuple[Any, ...] = (
        None,
        True,
        -1,
        0,
        1.5,
        1 << 70,
        1e400,
        "",
        "\x1b[31m",
        [],
        {},
        [[]],
        [1 << 62, 1 << 62],
        [0, 1 << 40],
    )
    for key, value in data.items():
        for other in odd:
            yield json.dumps(data | {key: other}).encode()
            if isinstance(value, dict):
                for inner in value:
                    yield json.dumps(data | {key: value | {inner: other}}).encode()
    yield from (
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"{",
        b"\xff\xfe",
        b"[]",
        b"1",
        b"9" * 5000,
        b'{"a":1,"a":2}',
        b'{"r":' + b"9" * 5000 + b"}",
    )


def attempt(path: Path, changed: Path) -> bool:
    """Whether it could be read; if not, in words."""
    start = time.process_time()
    try:
        check_fits(read_adapter(path, H), H, "base")
        fine = True
    except FileError as error:
        message = str(error)
        assert message.startswith(str(path)) and message.isprintable() and len(message) < 1000, (
            changed,
            message,
        )
        fine = False
    assert time.process_time() - start < 1
    return fine


def attempts(path: Path, changed: Path, files: Iterator[bytes]) -> tuple[int, int]:
    read_well = refused = 0
    for data in files:
        changed.write_bytes(data)
        fine = attempt(path, changed)
        read_well, refused = read_well + fine, refused + (not fine)
    return read_well, refused


@pytest.mark.usefixtures("little_memory")
def test_mutated_gguf(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    gguf.write_adapter(path, adapter(H, NAMES))
    assert attempt(path, path)
    fine, refused = attempts(path, path, broken(path.read_bytes(), 3))
    assert fine > 20 and refused > 700, (fine, refused)


@pytest.mark.usefixtures("little_memory")
def test_mutated_ggla(tmp_path: Path) -> None:
    path, good = tmp_path / "a.bin", ggla(adapter(H, (*NAMES, "output_norm.weight")), 4, 8)
    path.write_bytes(good)
    assert attempt(path, path)
    fine, refused = attempts(path, path, broken(good, 1))
    assert fine > 20 and refused > 1500, (fine, refused)


@pytest.mark.usefixtures("little_memory")
def test_mutated_peft(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    peft.write_peft(folder, Adapter(source=folder, alpha=8.0, pairs=adapter(H, NAMES).pairs), "", H)
    tensors, config = folder / peft.WEIGHTS, folder / peft.CONFIG
    good, plain = tensors.read_bytes(), config.read_bytes()
    assert attempt(folder, tensors)
    fine, refused = attempts(folder, tensors, broken(good, 3))
    assert fine > 20 and refused > 500, (fine, refused)
    length = struct.unpack_from("<Q", good)[0]
    header = json.loads(good[8 : 8 + length])
    heads = (struct.pack("<Q", len(head)) + head + good[8 + length :] for head in broken_json(header))
    fine, refused = attempts(folder, tensors, heads)
    assert fine > 10 and refused > 100, (fine, refused)
    tensors.write_bytes(good)
    fine, refused = attempts(
        folder, config, broken_json(json.loads(plain) | {"alpha_pattern": {"q_proj": 3}})
    )
    assert fine > 20 and refused > 60, (fine, refused)
    fine, refused = attempts(folder, config, broken(plain, 2))
    assert refused > 300, (fine, refused)


# ---- made by hand ----------------------------------------------------------


def record(
    shape: tuple[int, ...] = (4, 64), name: bytes = b"w.loraA", kind: int = 0, length: int | None = None
) -> bytes:
    count = len(name) if length is None else length
    return struct.pack(f"<III{len(shape)}I", len(shape), count, kind, *shape) + name + bytes(32)


@pytest.mark.parametrize(
    ("head", "tensor", "told"),
    [
        ((2, 4, 4), record(), "version 2, rank 4"),
        ((1, 0, 4), record(), "version 1, rank 0"),
        ((1, 4, 4), record(kind=2), "type Q4_0 is not supported; it must be F32 or F16"),
        ((1, 4, 4), record(kind=99), "type 99 is not supported"),
        ((1, 4, 4), record((4, 0)), "a dimension is 0"),
        ((1, 4, 4), record((1, 1, 1)), "3 dimensions"),
        ((1, 4, 4), record(()), "0 dimensions"),
        ((1, 4, 4), record(length=0), "a name of 0 bytes"),
        ((1, 4, 4), record(length=1 << 31), "a name of 2147483648 bytes"),
        ((1, 4, 4), record(length=60_000), "60000 bytes should follow"),
        ((1, 4, 4), record((1 << 31, 1 << 31)), f"{1 << 64} bytes should follow"),
        ((1, 4, 4), record()[:7], "4 bytes should follow"),
        ((1, 4, 4), b"", "no pair of factors"),
        ((1, 4, 4), record((1,), b"\x1b[31mloraA"), "is not a factor of an adapter"),
    ],
)
def test_crafted_ggla(tmp_path: Path, head: tuple[int, ...], tensor: bytes, told: str) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"algg" + struct.pack("<III", *head) + tensor)
    with pytest.raises(FileError, match=told) as error:
        read_adapter(path, H)
    assert str(error.value).isprintable()


def safetensors(header: Any, data: bytes = bytes(64), length: int | None = None) -> bytes:
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def tensor(lo: int = 0, hi: int = 16, shape: Any = (4,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [lo, hi]}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "the file is empty"),
        (b"1234567", r"got 0, in a file of 7"),
        (safetensors({}, length=0), "got 0, in a file"),
        (safetensors({}, length=(1 << 64) - 1), f"got {(1 << 64) - 1}, in a file"),
        (
            safetensors({}, bytes(MAX_HEADER + 8), length=MAX_HEADER + 1),
            f"at most {MAX_HEADER} bytes .got {MAX_HEADER + 1}",
        ),
        (safetensors({"w": []}), "needs a dtype"),
        (struct.pack("<Q", 15) + b'{"w":{},"w":{}}', "a key is there twice"),
        (safetensors({"w": tensor(shape=(-4,))}), "needs a dtype"),
        (safetensors({"w": tensor(shape=(True,) * 4)}), "needs a dtype"),
        (safetensors({"w": tensor(shape=(1 << 62,))}), "needs a dtype"),
        (safetensors({"w": tensor(shape=(1,) * 9)}), "needs a dtype"),
        (safetensors({"w": tensor(dtype=["F32"])}), "needs a dtype"),
        (safetensors({"w": tensor(0, 80, (20,))}), "at bytes 0 to 80 of only 64 bytes of data"),
        (safetensors({"w": tensor(16, 0)}), "at bytes 16 to 0"),
        (safetensors({"w": tensor(0, 12)}), "cannot have 12 bytes"),
        (safetensors({"w": tensor(shape=(1 << 40, 1 << 40))}), "cannot have 16 bytes"),
        (
            safetensors({"w": tensor(), "v": tensor(12, 28)}),
            "'v' begins at byte 12 of the data, inside another",
        ),
        (safetensors({"\x1b[31m": {}}), "needs a dtype"),
    ],
)
def test_crafted_safetensors(tmp_path: Path, data: bytes, told: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(data)
    with pytest.raises(FileError, match=told) as error:
        open_safetensors(path)
    assert str(error.value).isprintable()


def test_what_the_crafted_files_break_is_sound_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    others = {
        "v": tensor(16, 32, (2,), "F64"),
        "none": tensor(32, 32, (0,)),
        "__metadata__": {"format": "pt"},
    }
    path.write_bytes(safetensors({"w": tensor(), **others}, np.arange(16, dtype="<f4").tobytes()))
    entries = open_safetensors(path)
    assert entries["w"].raw.view("<f4").tolist() == [0, 1, 2, 3]
    assert entries["v"].kind is None and entries["none"].shape == (0,)
