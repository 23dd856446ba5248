"""Broken and hostile GGUF files: an error in one line that names file and place, at once and in little memory."""

import random
import re
import resource
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from llamatrain.errors import FileError
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.types import TensorInfo, type_by_name
from llamatrain.gguf.values import Kind, Value, encode_string, numbers, string, strings, u32
from llamatrain.gguf.writer import create_gguf
from tests.helpers.emulator import SLOWNESS, needs_memory_limits
from tests.helpers.tiny_gguf import every_kind

PLACE = re.compile(r"at byte \d+: ")
HUGE = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**61, 2**63 - 1, 2**63, 2**64 - 1)


def small_files(folder: Path) -> list[bytes]:
    """Valid files to break: one with each kind of value and several types of tensors, and a vocabulary."""
    infos = [
        TensorInfo("token_embd.weight", type_by_name("F32"), (3, 2)),
        TensorInfo("blk.0.q", type_by_name("Q4_K"), (1, 256)),
    ]
    words = {
        "tokenizer.ggml.tokens": strings([f"word{i}" for i in range(40)]),
        "x": numbers(Kind.FLOAT32, [0.5] * 40),
    }
    files = []
    for metadata in (every_kind(), {"general.alignment": u32(64), **words}):
        with create_gguf(folder / "base.gguf", metadata, infos) as out:
            for info in infos:
                out.write(info.name, [bytes(info.nbytes)])
        files.append((folder / "base.gguf").read_bytes())
    return files


def broken(files: list[bytes]) -> Iterator[bytes]:
    rng = random.Random(3)
    for data in files:
        for length in range(len(data)):
            yield data[:length]
        for place in range(
            0, len(data) - 8, 2
        ):  # a huge number in each place where a length or a count may be
            yield data[:place] + rng.choice(HUGE).to_bytes(8, "little") + data[place + 8 :]
        for _ in range(700):
            flipped = bytearray(data)
            for _ in range(rng.choice((1, 1, 2, 8))):
                flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            yield bytes(flipped)
        for _ in range(200):  # a piece moved, doubled or left out
            a, b, c, d = (rng.randrange(len(data)) for _ in range(4))
            yield data[:a] + data[min(b, c) : max(b, c)] + data[d:]


def read_all(path: Path) -> None:
    """Decode every value and touch every byte of every tensor."""
    gguf = open_gguf(path)
    for key in gguf.metadata:
        gguf.metadata[key]
    for tensor in gguf.tensors.values():
        assert tensor.raw.nbytes == tensor.nbytes
        tensor.raw.sum()


@pytest.fixture
def little_memory() -> Iterator[None]:
    """The process may grow by 200 MB and no more: beyond that it gets a MemoryError."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 200_000_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.usefixtures("little_memory")
def test_mutated_files_end_in_words(tmp_path: Path) -> None:
    path, opened, refused = tmp_path / "broken.gguf", 0, 0
    for data in broken(small_files(tmp_path)):
        path.write_bytes(data)
        start = time.process_time()
        try:
            read_all(path)
            opened += 1
        except FileError as error:
            message = str(error)
            assert message.startswith(f"{path}: ") and message.isprintable(), message
            assert PLACE.search(message) or not data, message
            refused += 1
        assert time.process_time() - start < SLOWNESS
    assert opened + refused > 3000 and opened > 100 and refused > 2000, (opened, refused)


@needs_memory_limits
def test_the_limit_of_memory_is_felt(little_memory: None) -> None:
    with pytest.raises(MemoryError):
        bytes(500_000_000)  # some of what is counted may be given back


# ---- made by hand ----------------------------------------------------------


def pair(key: str, kind: int, raw: bytes) -> bytes:
    return encode_string(key) + struct.pack("<I", kind) + raw


def tensor(
    name: str = "w", shape: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0, axes: int | None = None
) -> bytes:
    count = len(shape) if axes is None else axes
    return encode_string(name) + struct.pack(f"<I{len(shape)}QIQ", count, *shape, kind, offset)


def made(pairs: list[bytes], tensors: list[bytes], data: bytes = bytes(64)) -> bytes:
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(pairs)) + b"".join(pairs + tensors)
    return head + bytes(-len(head) % 32) + data


DEEP = struct.pack("<IQ", 9, 1) * 100_000 + struct.pack("<IQ", 4, 0)
WORDS = strings(["a", "b"]).raw[12:]
ALIGNED = "general.alignment"

CRAFTED = {
    "(got 0)": made([], [tensor(axes=0)]),
    "(got 5)": made([], [tensor(shape=(1,) * 5)]),
    "(got 2147483648)": made([], [tensor(axes=2**31)]),
    "a dimension is 0": made([], [tensor(shape=(8, 0, 2**63))]),
    "unknown tensor type 4;": made([], [tensor(kind=4)]),
    "not whole Q4_K blocks of 256": made([], [tensor(shape=(32,), kind=12)]),
    "its data ends at byte": made(
        [], [tensor(shape=(2**32, 2**32, 2**32))]
    ),  # 2^96 elements, which 64 bits would call 0
    "data's offset 4 is not a multiple": made([], [tensor(offset=4)]),
    f"its data ends at byte {2**63 + 96}": made([], [tensor(offset=2**63)]),
    "its data overlaps that of 'w'": made([], [tensor(shape=(9,)), tensor("v", offset=32)]),
    "duplicate name": made([], [tensor(), tensor(offset=32)]),
    "duplicate key": made([pair("k", 4, bytes(4))] * 2, []),
    "bytes (got 0)": made([pair("", 4, bytes(4))], []),
    "bytes (got 65536)": made([pair("k" * 65536, 4, bytes(4))], []),
    "unknown value type 13": made([pair("k", 13, bytes(4))], []),
    "unknown value type 4294967295": made([pair("k", 9, struct.pack("<IQ", 2**32 - 1, 1))], []),
    "arrays are nested more than 4 deep": made([pair("k", 9, DEEP)], []),
    f"{2**63} items of 1 bytes": made([pair("k", 9, struct.pack("<IQ", 0, 2**63))], []),
    f"{2**63} items of 8 bytes": made([pair("k", 9, struct.pack("<IQ", 8, 2**63) + WORDS)], []),
    f"{2**61} items of 12 bytes": made([pair("k", 9, struct.pack("<IQ", 9, 2**61))], []),
    "3 items of 8 bytes": made([pair("k", 9, struct.pack("<IQ", 8, 3) + WORDS)], [], b"")[:60],
    f"{2**64 - 1} bytes should follow": made([pair("k", 8, struct.pack("<Q", 2**64 - 1))], []),
    "(got UINT32 48)": made([pair(ALIGNED, 4, struct.pack("<I", 48))], []),
    "(got UINT32 )": made([pair(ALIGNED, 4, bytes(4))], []),
    "(got UINT64 ": made([pair(ALIGNED, 10, struct.pack("<Q", 64))], []),
    "the file at ": made([pair(ALIGNED, 4, struct.pack("<I", 2**31))], [tensor()]),
}


@pytest.mark.parametrize("reason", CRAFTED)
def test_crafted_files_are_refused(tmp_path: Path, reason: str) -> None:
    path = tmp_path / "crafted.gguf"
    path.write_bytes(CRAFTED[reason])
    with pytest.raises(FileError, match=re.escape(reason)) as error:
        open_gguf(path)
    assert str(error.value).startswith(f"{path}: ") and PLACE.search(str(error.value))


def test_what_the_crafted_files_break_is_sound_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "sound.gguf"
    nested = struct.pack("<IQ", 9, 1) * 3 + struct.pack("<IQB", 0, 1, 7)
    path.write_bytes(
        made([pair("k", 9, nested), pair("k2", 4, bytes(4))], [tensor(), tensor("v", offset=32)])
    )
    gguf = open_gguf(path)
    assert gguf.metadata["k"][0][0][0].tolist() == [7] and gguf.metadata["k2"] == 0
    assert [tensor.nbytes for tensor in gguf.tensors.values()] == [32, 32]


def test_a_large_file_that_lies_is_refused_at_once(tmp_path: Path) -> None:
    """A vocabulary of a million words, of which the last is not there; a million arrays of nothing."""
    path, words = tmp_path / "large.gguf", encode_string("word") * 1_000_000
    arrays = struct.pack("<IQ", 9, 100_000) + struct.pack("<IQ", 8, 0) * 100_000
    for value in (Value(Kind.ARRAY, struct.pack("<IQ", 8, 1_000_100) + words), Value(Kind.ARRAY, arrays)):
        path.write_bytes(made([pair("k", value.kind, bytes(value.raw)), pair("k", 4, bytes(4))], [], b""))
        start = time.process_time()
        with pytest.raises(FileError):
            open_gguf(path)
        assert time.process_time() - start < SLOWNESS


def test_names_from_a_file_cannot_steer_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "n.gguf"
    path.write_bytes(made([pair("\x1b[31m\nred", 4, bytes(4))] * 2, []))
    with pytest.raises(FileError) as error:
        open_gguf(path)
    assert str(error.value).isprintable()


def test_hostile_keys_of_a_split_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00002.gguf"
    for count, reason in (
        (u32(2**32 - 1), "must be named"),
        (string("2"), "split.count must be of type int .got STRING"),
        (u32(2), "part 2 of 2 of the split model is missing"),
    ):
        with create_gguf(path, {"split.count": count, "split.no": u32(0)}, []):
            pass
        with pytest.raises(FileError, match=reason):
            open_gguf(path)


def test_offsets_out_of_order_are_no_overlap(tmp_path: Path) -> None:
    path = tmp_path / "o.gguf"
    path.write_bytes(
        made([], [tensor(offset=32), tensor("v", offset=0)], np.arange(16, dtype="<f4").tobytes())
    )
    tensors = open_gguf(path).tensors
    assert tensors["w"].raw.view("<f4")[0] == 8 and tensors["v"].raw.view("<f4")[0] == 0
