"""Quantised weights packed into product tiles: the bytes that packing the decoded weight gives."""

import ctypes

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from llamatrain.compiler.declare import KernelEntry
from llamatrain.compiler.thread_pool import CallTable
from llamatrain.gguf.quants import decode
from llamatrain.gguf.quants.kinds import COMPILED, F32
from llamatrain.gguf.types import TYPES, GgmlType
from llamatrain.kernels.cpu import tiles
from llamatrain.kernels.cpu.dequantize import SLAB_BYTES, pack_quantized
from llamatrain.kernels.cpu.matmul import Product, make_operands
from llamatrain.kernels.cpu.pack import pack_whole
from llamatrain.kernels.quantized import Blocks

TRAINED = [TYPES[number] for number in sorted(COMPILED - {F32})]
MODES = [tiles.ROUNDED, tiles.PAIRS, tiles.TILES]  # only packed, not multiplied: any machine can
UNTOUCHED = 0xA5


def name(kind: GgmlType) -> str:
    return kind.name


def random_weight(kind: GgmlType, rows: int, columns: int) -> np.ndarray:
    """Any bytes, but of blocks that hold NaN: it may be any of many bits."""
    raw = np.random.default_rng(kind.number).integers(
        0, 256, (rows, columns // kind.block_size * kind.block_bytes), np.uint8
    )
    nothing = np.isnan(decode(raw, kind)).reshape(rows, -1, kind.block_size).any(-1)
    raw.reshape(rows, -1, kind.block_bytes)[nothing] = 0
    return raw


def aligned(size: int) -> np.ndarray:
    whole = np.full(size + 128, UNTOUCHED, np.uint8)
    return whole[-whole.ctypes.data % 64 :][: size + 64]  # 64 more, to see that they stay as they are


def panel_bytes(mode: int, count: int, k: int) -> int:
    return int(tiles.panel_bytes.py_func(mode, count, k))


@KernelEntry
def pack_decoded(lo, hi, thread, mode, to, source, across, stride, count, k):
    tiles.pack_b(mode, to, source, 1, across, stride, count, k)


@KernelEntry
def pack_part(lo, hi, thread, mode, to, kind, raw, row_bytes, across, first, rows, start, columns, room):
    pack_quantized(mode, to, kind, raw, row_bytes, across, first, rows, start, columns, room)


def expected(mode: int, weight: np.ndarray, across: int) -> np.ndarray:
    """What pack_b makes of a bf16 weight, with rows (across: columns) as the operand's columns."""
    weight = np.ascontiguousarray(weight)
    count, k = weight.shape[::-1] if across else weight.shape
    to = aligned(panel_bytes(mode, count, k))
    CallTable([pack_decoded.call(mode, to, weight, across, weight.shape[1], count, k, items=1, block=1)], 1)()
    return to[:-64]


def check(
    kind: GgmlType, raw: np.ndarray, across: int, first: int, rows: int, start: int, columns: int
) -> None:
    """A part of a weight packs as if it had been decoded before."""
    part = decode(raw, kind, bf16=True)[first : first + rows, start : start + columns]
    for mode in MODES:
        wanted = expected(mode, part, across)
        to, room = aligned(wanted.size), aligned(SLAB_BYTES)
        args = (mode, to, kind.number, raw, raw.shape[1], across, first, rows, start, columns, room)
        CallTable([pack_part.call(*args, items=1, block=1)], 1)()
        assert_array_equal(to[:-64], wanted)
        assert (to[-64:] == UNTOUCHED).all() and (room[-64:] == UNTOUCHED).all()


@pytest.mark.parametrize("across", [0, 1])
@pytest.mark.parametrize("kind", TRAINED, ids=name)
def test_a_whole_weight(kind: GgmlType, across: int) -> None:
    for rows, columns in ((1, 256), (77, 768), (140, 1024)):
        columns += 0 if kind.block_size == 256 else kind.block_size * 7  # ragged, as far as blocks allow
        check(kind, random_weight(kind, rows, columns), across, 0, rows, 0, columns)


@pytest.mark.parametrize("across", [0, 1])
@pytest.mark.parametrize("kind", TRAINED, ids=name)
def test_a_panel_alone(kind: GgmlType, across: int) -> None:
    raw = random_weight(kind, 90, 2048)
    for part in ((5, 33, 256, 768), (89, 1, 1792, 256), (16, 64, 512, 1280)):
        check(kind, raw, across, *part)


def test_each_thread_decodes_into_its_own_room() -> None:
    """Of a product, whose scratch memory has room for each behind the packed weight."""
    kind, threads = TRAINED[0], 3
    weight = Blocks(kind, (64, 256), random_weight(kind, 64, 256))
    product = Product(
        *make_operands(np.zeros((100, 256), np.float32), weight, across=0), tiles.PAIRS, threads
    )
    memory = aligned(product.scratch)
    call = product.pack_call(memory, np.zeros(1, np.int64), 0)
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(pack_whole.address)(0, 1, 1, call.words.ctypes.data)
    rooms = memory[product.entry_bytes : product.scratch].reshape(threads, -1)
    assert (rooms != UNTOUCHED).any(axis=1).tolist() == [False, True, False]
