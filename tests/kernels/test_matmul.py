"""Matrix products in every layout, precision and unit, against numpy in float64."""

import dataclasses
import itertools
import platform
import re
from collections import Counter

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir

from llamatrain.compiler.thread_pool import CallTable
from llamatrain.kernels.cpu import matmul, tiles
from llamatrain.kernels.cpu.llvm import microkernel
from llamatrain.kernels.cpu.registry import BINDINGS
from llamatrain.platform import cpu

RANDOM = np.random.default_rng(0)
PLANS = {"matmul": matmul.matmul_plan, "matmul_nn": matmul.matmul_nn_plan, "out_prod": matmul.out_prod_plan}
FORMULAS = {
    "matmul": lambda x, w: x @ np.swapaxes(w, -1, -2),
    "matmul_nn": lambda y, w: y @ w,
    "out_prod": lambda a, b: np.swapaxes(a, -1, -2) @ b,
}
# how bf16 is multiplied: all ways that this machine has
WAYS = ["float32", *(unit for unit in ("avx512bf16", "amx") if unit in cpu.enabled_units())]
SHAPES = [(1, 1, 1), (7, 13, 5), (33, 65, 129), (300, 8, 70), (1, 40, 1100), (260, 140, 1060), (40, 96, 2100)]
UNTOUCHED = np.float32(7)


def normal(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


def halved(x):
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widened(x):
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x


def multiply(plan, shape):
    """The product by one thread, the same bits by two; nothing is written beside it."""
    results = []
    for threads in (1, 2):
        plan = dataclasses.replace(plan, threads=threads)
        room = np.full(plan.scratch + 64, 0xFF, np.uint8)  # full of NaN
        around = np.full(int(np.prod(shape)) + 64, UNTOUCHED, np.float32)
        out = around[32:-32].reshape(shape)
        CallTable(plan.calls(out, room[-room.ctypes.data % 64 :]), threads)()
        assert (around[:32] == UNTOUCHED).all() and (around[-32:] == UNTOUCHED).all()
        results.append(out)
    assert results[0].tobytes() == results[1].tobytes()
    return results[0]


def check(op, a, b, way=None):
    half = np.uint16 in (a.dtype, b.dtype)
    plan = PLANS[op]((a, b), 1)
    if way is not None:
        plan = dataclasses.replace(plan, mode=tiles.choose_mode(way))
    a, b = (widened(halved(widened(x)) if half else x).astype(np.float64) for x in (a, b))
    wanted, size = FORMULAS[op](a, b), FORMULAS[op](abs(a), abs(b))
    error = abs(multiply(plan, wanted.shape) - wanted)
    assert (error <= 1e-6 * size + 1e-30).all(), (error / size).max()


def sources(op, m, n, k):
    shapes = {"matmul": ((m, k), (n, k)), "matmul_nn": ((m, k), (k, n)), "out_prod": ((k, m), (k, n))}
    return [normal(*shape) for shape in shapes[op]]


@pytest.mark.parametrize("op", PLANS)
@pytest.mark.parametrize("shape", SHAPES)
def test_float32(op, shape):
    check(op, *sources(op, *shape))


@pytest.mark.parametrize("op", PLANS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("halves", [(1, 0), (0, 1), (1, 1)])
def test_bf16(op, way, halves):
    for shape in SHAPES:
        check(
            op, *(halved(x) if half else x for x, half in zip(sources(op, *shape), halves, strict=True)), way
        )


BROADCASTS = [
    ("matmul", (3, 4, 33, 20), (3, 1, 40, 20)),
    ("matmul", (3, 1, 33, 20), (1, 4, 40, 20)),
    ("matmul", (4, 33, 20), (3, 1, 8, 20)),
    ("matmul", (3, 4, 33, 20), (40, 20)),
    ("matmul_nn", (3, 4, 33, 20), (3, 1, 20, 40)),
    ("matmul_nn", (2, 5, 20), (20, 40)),
    ("out_prod", (3, 4, 33, 20), (3, 4, 33, 40)),
    ("out_prod", (4, 33, 20), (3, 1, 33, 40)),
]


@pytest.mark.parametrize(("op", "a", "b"), BROADCASTS)
def test_leading_axes_broadcast(op, a, b):
    check(op, normal(*a), normal(*b))
    check(op, normal(*a), halved(normal(*b)))


@pytest.mark.parametrize("op", PLANS)
def test_what_does_not_fit_is_packed_in_parts(op, monkeypatch):
    monkeypatch.setattr(matmul, "largest_slice", lambda mode: matmul.Slice(128, 64))
    monkeypatch.setattr(matmul, "MAX_PACKED_BYTES", 20_000)
    check(op, *sources(op, 70, 50, 300))
    monkeypatch.setattr(matmul, "MAX_PACKED_BYTES", 40_000)
    a, b = sources(op, 70, 50, 60)
    check(op, np.stack([a, a + 1, a + 2, a + 3, a + 4]), np.stack([b, b - 1, b - 2, b - 3, b - 4]))


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((4, 1), (1, 1)),
        ((7, 33), (65, 33)),
        ((300, 70), (8, 70)),
        ((260, 1060), (140, 1060)),
        ((3, 4, 33, 20), (3, 1, 40, 20)),
    ],
)
def test_a_bias_is_added_to_each_row(a, b, half):
    """Of a product whichever operand is packed whole, by one thread and two, and in parts."""
    x, w, bias = normal(*a), normal(*b), normal(b[-2])
    x = halved(x) if half else x
    found = [run("matmul", x, w, bias, threads=threads) for threads in (1, 2)]
    assert found[0].tobytes() == found[1].tobytes()
    np.testing.assert_array_equal(found[0], run("matmul", x, w) + bias)


def test_a_bias_is_added_once_where_k_goes_in_parts(monkeypatch):
    monkeypatch.setattr(matmul, "largest_slice", lambda mode: matmul.Slice(128, 64))
    monkeypatch.setattr(matmul, "MAX_PACKED_BYTES", 20_000)
    x, w, bias = normal(5, 70, 300), normal(5, 50, 300), normal(50)
    np.testing.assert_array_equal(run("matmul", x, w, bias), run("matmul", x, w) + bias)
    x = normal(70, 0)
    np.testing.assert_array_equal(run("matmul", x, normal(50, 0), bias), np.broadcast_to(bias, (70, 50)))


def run(op, a, b, *bias, threads=2):
    out = np.full(FORMULAS[op](a.astype(bool), b.astype(bool)).shape, UNTOUCHED, np.float32)
    binding = BINDINGS[op]
    ins = [a, b, *bias]
    assert binding.takes([out], ins, {})
    room = np.zeros(binding.scratch([out], ins, {}, threads) + 64, np.uint8)
    CallTable(binding.bind([out], ins, {}, room[-room.ctypes.data % 64 :], threads), threads)()
    return out


def test_nothing_to_add_gives_zeros_and_nothing_to_write_gives_no_calls():
    assert not run("matmul", normal(3, 0), normal(4, 0)).any()
    assert not run("out_prod", normal(0, 3), normal(0, 4)).any()
    out = np.zeros((0, 4), np.float32)
    assert BINDINGS["matmul"].bind([out], [normal(0, 5), normal(4, 5)], {}, np.zeros(0, np.uint8), 2) == []


@pytest.mark.parametrize("half", [False, True])
def test_not_a_number_stays_where_it_belongs(half):
    x, w = normal(40, 50), normal(30, 50)
    x[3, 7], x[20, 49], w[5, 0] = np.nan, np.inf, np.nan
    y = run("matmul", x, halved(w) if half else w)
    odd = np.zeros(y.shape, bool)
    odd[3], odd[20], odd[:, 5] = True, True, True
    assert (
        np.isnan(y[3]).all()
        and np.isnan(y[:, 5]).all()
        and np.isinf(np.delete(y[20], 5)).all()
        and np.isfinite(y[~odd]).all()
    )


def test_bf16_rounds_to_the_nearest_even():
    bits = RANDOM.integers(0x3F800000, 0x40000000, (48, 48)).astype(np.uint32)
    bits[:, ::3] = bits[:, ::3] & 0xFFFF0000 | 0x8000  # halfway
    x, one = bits.view(np.float32), halved(np.eye(48, dtype=np.float32))
    for way in WAYS:
        plan = dataclasses.replace(matmul.matmul_plan((x, one), 1), mode=tiles.choose_mode(way))
        assert (multiply(plan, x.shape) == widened(halved(x))).all()


def test_scratch_is_a_slice_for_each_thread_and_a_few_megabytes():
    shapes = itertools.permutations((64, 2048, 32000))
    for (m, n, k), half in itertools.product(shapes, (np.float32, np.uint16)):
        x, w = (np.broadcast_to(half(0), shape) for shape in ((m, k), (n, k)))
        one, two = (matmul.matmul_plan((x, w), threads).scratch for threads in (1, 2))
        assert two <= 10 << 20 and two - one <= 1 << 20


def tile_instructions(count, emit):
    """Return how often each instruction of the tile unit occurs in a function with `count` integers."""
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * count), "kernel")
    builder = ir.IRBuilder(function.append_basic_block())
    emit(builder, *function.args)
    builder.ret_void()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple("x86_64-unknown-linux-gnu")
    text = target.create_target_machine(cpu="sapphirerapids").emit_assembly(llvm.parse_assembly(str(module)))
    return Counter(re.findall(r"^\t(tile\w+|tdp\w+|ldtilecfg)", text, re.MULTILINE))


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the unit is x86's")
def test_the_tile_units_code_is_made_where_the_unit_is_not():
    assert tile_instructions(0, microkernel.emit_configure) == {"ldtilecfg": 1}
    assert tile_instructions(0, microkernel.emit_release) == {"tilerelease": 1}
    product = {"tilezero": 4, "tileloadd": 8, "tdpbf16ps": 4, "tilestored": 5}
    assert tile_instructions(8, microkernel.emit_tile_kernel) == product
    assert tile_instructions(0, microkernel.emit_zero_tiles) == {"tilezero": 4}
    assert tile_instructions(4, microkernel.emit_add_byte_products) == {"tileloadd": 4, "tdpbusd": 4}
    assert tile_instructions(2, microkernel.emit_store_tiles) == {"tilestored": 4}


def test_plans_and_kernels_agree_on_sizes() -> None:
    for mode in range(4):
        for count, k in ((1, 0), (16, 16), (17, 33), (100, 1024)):
            assert tiles.packed_bytes(mode, count, k) == tiles.panel_bytes(mode, count, k)


@pytest.mark.parametrize("way", ["f32", *WAYS])
@pytest.mark.parametrize(("k", "n"), [(64, 48), (3000, 64), (2100, 20)])
def test_a_row_does_not_depend_on_the_others(k, n, way):
    """It has the same bits in a product of any number of rows, also where the sum is made in several parts."""
    x, w = normal(64, k), normal(n, k)
    if way != "f32":
        x, w = halved(x), halved(w)

    def product(rows):
        plan = dataclasses.replace(matmul.matmul_plan([rows, w], 1), mode=tiles.choose_mode(way))
        return multiply(plan, (len(rows), n))

    whole = product(x)
    for count in (1, 4, 7, 15, 16, 17, 33, 48):
        assert product(np.ascontiguousarray(x[-count:])).tobytes() == whole[-count:].tobytes(), count
