"""Quantised weights packed into product tiles: the bytes that packing the decoded weight gives."""

import ctypes

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from llamatrain.files.quants import decode
from llamatrain.files.quants.kinds import COMPILED, F32
from llamatrain.files.types import TYPES, GgmlType
from llamatrain.kernels.cpu import quantised, tiles
from llamatrain.kernels.cpu.quantised import ROOM, pack_quantised, packing
from llamatrain.machine.jit import Entry
from llamatrain.machine.threads import Program

TRAINED = [TYPES[number] for number in sorted(COMPILED - {F32})]
MODES = [tiles.ROUNDED, tiles.PAIRS, tiles.TILES]  # only packed, not multiplied: any machine can
UNTOUCHED = 0xA5


def name(kind: GgmlType) -> str:
    return kind.name


def random_weight(kind: GgmlType, rows: int, columns: int) -> np.ndarray:
    raw = np.random.default_rng(kind.number).integers(0, 256, (rows, columns // kind.block * kind.size), np.uint8)
    if kind.block == 1:
        raw[:, 1::2] &= 0x3F  # NaN may be any of many bits
    return raw


def aligned(size: int) -> np.ndarray:
    whole = np.full(size + 128, UNTOUCHED, np.uint8)
    return whole[-whole.ctypes.data % 64 :][: size + 64]  # 64 more, to see that they stay as they are


def panel_bytes(mode: int, count: int, k: int) -> int:
    return int(tiles.panel_bytes.py_func(mode, count, k))


@Entry
def pack_decoded(lo, hi, thread, a):  # type: ignore[no-untyped-def]
    """a: mode, to, source, across, stride, count, k"""
    tiles.pack_b(a[0], a[1], a[2], 1, a[3], a[4], a[5], a[6])


@Entry
def pack_part(lo, hi, thread, a):  # type: ignore[no-untyped-def]
    pack_quantised(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10])


def expected(mode: int, weight: np.ndarray, across: int) -> np.ndarray:
    """What pack_b makes of a bf16 weight, with rows (across: columns) as the operand's columns."""
    weight = np.ascontiguousarray(weight)
    count, k = weight.shape[::-1] if across else weight.shape
    to = aligned(panel_bytes(mode, count, k))
    Program([pack_decoded.call(mode, to, weight, across, weight.shape[1], count, k, items=1, block=1)], 1)()
    return to[:-64]


def packed_weight(mode: int, kind: GgmlType, raw: np.ndarray, across: int, k_block: int, size: int, threads: int) -> np.ndarray:
    to, room = aligned(size), aligned(threads * ROOM)
    Program([packing(mode, kind.number, raw, across, k_block, to, room)], threads)()
    assert (to[-64:] == UNTOUCHED).all() and (room[-64:] == UNTOUCHED).all()
    return to[:-64]


@pytest.mark.parametrize("across", [0, 1])
@pytest.mark.parametrize("kind", TRAINED, ids=name)
def test_a_weight_packs_as_if_decoded_before(kind: GgmlType, across: int) -> None:
    for rows, columns in ((1, 256), (77, 768), (140, 1024)):
        columns += 0 if kind.block == 256 else kind.block * 7  # ragged, as far as blocks allow
        raw = random_weight(kind, rows, columns)
        weight = decode(raw, kind, bf16=True)
        for mode in MODES:
            blocks = [weight[i : i + 256] if across else weight[:, i : i + 256] for i in range(0, (columns, rows)[across], 256)]
            wanted = np.concatenate([expected(mode, block, across) for block in blocks])
            for threads in (1, 2):
                assert_array_equal(packed_weight(mode, kind, raw, across, 256, wanted.size, threads), wanted)


@pytest.mark.parametrize("across", [0, 1])
@pytest.mark.parametrize("kind", TRAINED, ids=name)
def test_a_panel_packs_alone(kind: GgmlType, across: int) -> None:
    raw = random_weight(kind, 90, 2048)
    weight = decode(raw, kind, bf16=True)
    for first, rows, start, columns in ((0, 90, 0, 2048), (5, 33, 256, 768), (89, 1, 1792, 256), (16, 64, 512, 1280)):
        for mode in MODES:
            wanted = expected(mode, weight[first : first + rows, start : start + columns], across)
            to, room = aligned(wanted.size), aligned(ROOM)
            args = (mode, to, kind.number, raw, raw.shape[1], across, first, rows, start, columns, room)
            Program([pack_part.call(*args, items=1, block=1)], 1)()
            assert_array_equal(to[:-64], wanted)
            assert (to[-64:] == UNTOUCHED).all() and (room[-64:] == UNTOUCHED).all()


def test_each_thread_decodes_into_its_own_room() -> None:
    kind = TRAINED[0]
    to, room = aligned(panel_bytes(tiles.PAIRS, 64, 256)), aligned(3 * ROOM)
    call = packing(tiles.PAIRS, kind.number, random_weight(kind, 64, 256), 0, 256, to, room)
    quantised.pack_quantised_weight.compiled.ctypes(0, 1, 1, call.args.ctypes.data_as(ctypes.POINTER(ctypes.c_int64)))
    used = (room[: 3 * ROOM].reshape(3, ROOM) != UNTOUCHED).any(axis=1)
    assert used.tolist() == [False, True, False]
