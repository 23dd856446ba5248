"""Decoding with torch: the same bits as `gguf.quants` for every type, in every layout of memory."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llamatrain.gguf import quants
from llamatrain.gguf.types import TYPES, GgmlType, type_by_name

torch = pytest.importorskip("torch")
from llamatrain.kernels.torch import dequantize as D  # noqa: E402

DECODABLE = [kind for kind in TYPES.values() if D.can_decode(kind)]
BLOCKS = [kind for kind in DECODABLE if kind.block_size > 1]
SHAPES = [(1, 1), (7, 1), (1, 5), (6, 3), (0, 2)]  # rows, blocks of a row


def name(kind: GgmlType) -> str:
    return kind.name


def random_bytes(kind: GgmlType, rows: int, columns: int) -> np.ndarray:
    rng = np.random.default_rng(kind.number)
    return rng.integers(0, 256, (rows, kind.row_bytes(columns)), np.uint8)


def weights(kind: GgmlType, rows: int, columns: int) -> np.ndarray:
    """Encoded weights, or random bytes if the type cannot be written."""
    if kind.name not in quants.WRITABLE_TYPES:
        return random_bytes(kind, rows, columns)
    values = np.random.default_rng(kind.number).standard_normal((rows, columns)) * 0.02
    return quants.encode(values.astype(np.float32), kind)


def decode(raw: torch.Tensor, kind: GgmlType, columns: int, dtype: torch.dtype) -> torch.Tensor:
    out = torch.full((len(raw), columns), 123.0, dtype=dtype)
    assert D.dequantize(raw, kind, out) is out
    return out


def assert_same_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare bits, except those of NaN."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[found.itemsize]
    same = (found.view(words) == wanted.view(words)) | found.isnan() & wanted.isnan()
    assert same.all()


def check(raw: np.ndarray, kind: GgmlType, columns: int) -> None:
    before = raw.copy()
    wanted = torch.from_numpy(quants.decode(raw, kind))
    rounded = torch.from_numpy(quants.decode(raw, kind, bf16=True).view(np.int16)).view(torch.bfloat16)
    packed = torch.from_numpy(raw)
    assert_same_bits(decode(packed, kind, columns, torch.float32), wanted)
    assert_same_bits(decode(packed, kind, columns, torch.bfloat16), rounded)
    assert np.array_equal(raw, before)


def test_every_type_that_can_be_decoded() -> None:
    for kind in TYPES.values():
        if D.can_decode(kind):
            continue
        with pytest.raises(quants.QuantError):
            quants.decode(np.zeros((1, kind.block_bytes), np.uint8), kind)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", DECODABLE, ids=name)
def test_weights(kind: GgmlType, shape: tuple[int, int]) -> None:
    rows, columns = shape[0], shape[1] * kind.block_size
    check(weights(kind, rows, columns), kind, columns)


@pytest.mark.parametrize("kind", DECODABLE, ids=name)
def test_any_bytes(kind: GgmlType) -> None:
    """Scales may be infinite, not a number or very small."""
    columns = 20 * kind.block_size
    check(random_bytes(kind, 20, columns), kind, columns)


@pytest.mark.parametrize("kind", BLOCKS, ids=name)
def test_every_byte_at_every_place(kind: GgmlType) -> None:
    """Blocks of one byte, each with another byte at one place."""
    base = np.repeat(np.arange(256, dtype=np.uint8), kind.block_bytes)[:, None]
    raw = np.broadcast_to(base, (len(base), kind.block_bytes)).copy()
    places = np.tile(np.arange(kind.block_bytes), 256)
    raw[np.arange(len(raw)), places] ^= 0x5A
    check(raw[::31], kind, kind.block_size)


@pytest.mark.parametrize("kind", DECODABLE, ids=name)
def test_double_precision(kind: GgmlType) -> None:
    """Types with long numbers keep them; the others are exact."""
    columns = 2 * kind.block_size
    raw = weights(kind, 3, columns)
    found = decode(torch.from_numpy(raw), kind, columns, torch.float64)
    exact = {"F64": np.float64, "I32": np.int32, "I64": np.int64}
    values = raw.view(exact[kind.name]) if kind.name in exact else quants.decode(raw, kind)
    assert_same_bits(found, torch.from_numpy(values.astype(np.float64)))


@pytest.mark.parametrize("kind", DECODABLE, ids=name)
def test_rows_that_are_apart(kind: GgmlType) -> None:
    """Read every second row of the weights, and write a part of each row of the result."""
    columns = 4 * kind.block_size
    raw = weights(kind, 6, columns)
    out = torch.full((3, columns + 16), 5.0)
    D.dequantize(torch.from_numpy(raw)[::2], kind, out[:, 8:-8])
    assert_same_bits(out[:, 8:-8].contiguous(), torch.from_numpy(quants.decode(raw[::2], kind)))
    assert (out[:, :8] == 5).all() and (out[:, -8:] == 5).all()


@pytest.mark.parametrize("shift", [1, 2])
@pytest.mark.parametrize("kind", DECODABLE, ids=name)
def test_any_address(kind: GgmlType, shift: int) -> None:
    columns = 2 * kind.block_size
    raw = weights(kind, 3, columns)
    memory = torch.zeros(raw.size + 8, dtype=torch.uint8)
    moved = memory[shift : shift + raw.size].view(raw.shape)
    moved.copy_(torch.from_numpy(raw))
    assert_same_bits(decode(moved, kind, columns, torch.float32), torch.from_numpy(quants.decode(raw, kind)))


@pytest.mark.parametrize("chunk", [1, 700])
@pytest.mark.parametrize("kind", [type_by_name(each) for each in ("Q4_K", "Q8_0", "F16")], ids=name)
def test_chunks(kind: GgmlType, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks consist of whole rows, at least one, and the last one may be short."""
    monkeypatch.setattr(D, "SMALL_CHUNK_ELEMENTS", chunk)
    check(weights(kind, 5, 256), kind, 256)


def test_wrong_shape() -> None:
    kind = type_by_name("Q8_0")
    raw = torch.zeros((2, 68), dtype=torch.uint8)
    with pytest.raises(ValueError, match="Q8_0"):
        D.dequantize(raw, kind, torch.zeros(2, 32))
    with pytest.raises(ValueError, match="whole"):
        D.dequantize(raw, kind, torch.zeros(2, 65))


def peak(raw: torch.Tensor, kind: GgmlType, out: torch.Tensor, path: Path) -> int:
    """Return the most bytes that decoding has allocated at once."""
    from torch.profiler import ProfilerActivity, profile

    D.dequantize(raw, kind, out)  # makes the tables
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        D.dequantize(raw, kind, out)
    recorded.export_chrome_trace(str(path / "trace.json"))
    events = json.loads((path / "trace.json").read_text())["traceEvents"]
    memory = sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"])
    return max(np.cumsum([0, *(event["args"]["Bytes"] for event in memory)]))


@pytest.mark.parametrize("kind", BLOCKS, ids=name)
def test_allocated_bytes(kind: GgmlType, tmp_path: Path) -> None:
    """What is said to be allocated is enough, and not more than twice of what bf16 results need."""
    rows, columns = 32, 2048
    raw, bound = torch.from_numpy(weights(kind, rows, columns)), D.decode_bytes(kind, rows, columns)
    for dtype in (torch.float32, torch.bfloat16):
        taken = peak(raw, kind, torch.empty((rows, columns), dtype=dtype), tmp_path)
        assert taken <= bound
    assert bound <= 2 * taken


@pytest.mark.parametrize("kind", BLOCKS, ids=name)
def test_declared_scratch(kind: GgmlType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A graphics processor needs what a CPU needs for codes and scales, and converts nothing in memory."""
    rows, columns = 32, 2048
    raw, layout = torch.from_numpy(weights(kind, rows, columns)), D.LAYOUTS[kind.name]

    def only_parts(raw: torch.Tensor, kind: GgmlType, out: torch.Tensor) -> None:
        layout.parts(raw.unflatten(1, (-1, kind.block_bytes)))

    monkeypatch.setattr(D, "_decode_rows", only_parts)
    taken = peak(raw, kind, torch.empty(rows, columns), tmp_path) / (rows * columns)
    assert taken <= layout.scratch <= 2 * taken + 0.25


@pytest.mark.parametrize("kind", DECODABLE, ids=name)
def test_allocated_bytes_are_limited(kind: GgmlType) -> None:
    """From some number of rows on, chunks are decoded."""
    many, more = (D.decode_bytes(kind, rows, 1 << 14) for rows in (1 << 12, 1 << 20))
    assert many == more
    assert D.decode_bytes(kind, 0, 1 << 14) == 0


def test_numba_is_not_needed() -> None:
    code = "import sys, llamatrain.kernels.torch.dequantize; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
