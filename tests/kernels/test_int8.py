"""Products in 8-bit integers: the definition keeps its promises, and compiled kernels give its bits."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from llamatrain.compiler.thread_pool import CallTable
from llamatrain.engine.device import is_compiled
from llamatrain.engine.program import Program
from llamatrain.errors import GraphError
from llamatrain.gguf import quants
from llamatrain.gguf.quants.kinds import COMPILED
from llamatrain.gguf.types import TYPES, GgmlType, type_by_name
from llamatrain.graph import ops
from llamatrain.graph.autodiff import value_and_gradients
from llamatrain.graph.int8 import use_int8_products
from llamatrain.graph.precision import round_products
from llamatrain.graph.tensor import (
    BF16,
    Node,
    Tensor,
    collect_nodes,
    parameter,
    placeholder,
    quantized,
    state,
)
from llamatrain.kernels.cpu import matmul
from llamatrain.kernels.cpu.int8_weight import pack_weight, packed_type
from llamatrain.kernels.cpu.registry import BINDINGS
from llamatrain.kernels.quantized import Blocks, PackedWeight
from llamatrain.kernels.reference import int8
from llamatrain.kernels.reference.registry import run_kernel, to_bf16
from llamatrain.platform.cpu import has_int8_products

OPS = ("matmul_int8", "matmul_nn_int8")
SHAPES = [  # m, n, k
    (1, 1, 1),
    (1, 40, 1100),
    (7, 13, 5),
    (33, 65, 129),
    (300, 8, 70),
    (5, 30, 255),
    (64, 32, 256),
    (3, 18, 257),
    (40, 7, 511),
    (17, 33, 512),
    (2, 3, 513),
    (260, 140, 1060),
    (40, 96, 2100),
]
QUANTIZED = ("F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K")
UNTOUCHED = np.float32(7)
SMALL = 1e-30
DRAWS = 4096  # rows of 255 draws each: more than a million

Multiply = Callable[..., np.ndarray]


# ---- the two ways to multiply ------------------------------------------------------------------


def skip_without_kernels() -> None:
    if not has_int8_products():
        pytest.skip("this processor has no products of 8-bit integers")
    if not is_compiled("cpu"):
        pytest.skip("there are no compiled kernels for this machine")


@pytest.fixture
def compiled() -> None:
    skip_without_kernels()


@pytest.fixture(params=["reference", "compiled"])
def multiply(request: pytest.FixtureRequest) -> Multiply:
    """The definition, then the compiled kernels."""
    if request.param == "reference":
        return run_reference
    skip_without_kernels()
    return run_compiled


def product_shape(op: str, x: np.ndarray, w: np.ndarray | Blocks | PackedWeight) -> tuple[int, ...]:
    return (*x.shape[:-1], w.shape[0 if op == "matmul_int8" else 1])


def run_reference(op: str, *ins: Any) -> np.ndarray:
    x, w, *_ = ins
    out = np.empty(product_shape(op, x, w), np.float32)
    run_kernel(op, [out], ins, {})
    return out


def run_compiled(op: str, *ins: Any, threads: int = 2) -> np.ndarray:
    """Return a product; check that its kernel reads no scratch memory before it is written, and writes nothing beside it."""
    x, w, *_ = ins
    shape = product_shape(op, x, w)
    around = np.full(np.prod(shape, dtype=int) + 64, UNTOUCHED, np.float32)
    out = around[32:-32].reshape(shape)
    assert BINDINGS[op].takes([out], ins, {})
    size = BINDINGS[op].scratch([out], ins, {}, threads)
    whole = np.full(size + 128, 0xFF, np.uint8)  # NaN, as float32
    scratch = whole[-whole.ctypes.data % 64 :][: size + 64]
    CallTable(BINDINGS[op].bind([out], ins, {}, scratch[:size], threads), threads)()
    assert (around[:32] == UNTOUCHED).all() and (around[-32:] == UNTOUCHED).all()
    assert (scratch[size:] == 0xFF).all()
    return out


def assert_same_bits(found: np.ndarray, wanted: np.ndarray) -> None:
    """NaN may be any of its bits."""
    not_a_number = np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(found), not_a_number)
    different = (found.view(np.uint32) != wanted.view(np.uint32)) & ~not_a_number
    assert not different.any(), (different.mean(), found[different][:3], wanted[different][:3])


def check_kernels(op: str, *ins: Any) -> None:
    wanted = run_reference(op, *ins)
    for threads in (1, 2, 3):
        assert_same_bits(run_compiled(op, *ins, threads=threads), wanted)


# ---- what is multiplied ------------------------------------------------------------------------


def normal(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.standard_normal(shape, np.float32)


def activations(random: np.random.Generator, m: int, k: int) -> np.ndarray:
    """Rows of several sizes; some are zero, near the smallest scale, or have one huge value."""
    x = normal(random, m, k) * np.exp(normal(random, m, k))
    x[1::7] = 0
    x[2::7] *= np.float32(SMALL)
    x[3::7] *= np.float32(int8.SMALLEST)
    x[4::7, k // 2] = 1e30
    return x


def weight(op: str, random: np.random.Generator, n: int, k: int) -> np.ndarray:
    """n columns of the product, of which one is nearly zero: rows of `matmul_int8`'s weight."""
    w = normal(random, n, k)
    w[n // 2] *= np.float32(1e-38 if n > 1 else 1)
    return orient(op, w)


def orient(op: str, w: np.ndarray) -> np.ndarray:
    """Turn a weight whose rows are columns of the product as an op reads it, and back."""
    return np.ascontiguousarray(w if op == "matmul_int8" else w.T)


def encode(w: np.ndarray, kind: GgmlType) -> Blocks:
    return Blocks(kind, w.shape, quants.encode(w, kind))


def any_bytes(kind: GgmlType, rows: int, columns: int) -> Blocks:
    """A weight of random bytes, without blocks that hold NaN."""
    random = np.random.default_rng(kind.number)
    raw = random.integers(0, 256, (rows, columns // kind.block_size, kind.block_bytes), np.uint8)
    with np.errstate(all="ignore"):
        values = quants.decode(raw.reshape(rows, -1), kind).reshape(rows, -1, kind.block_size)
    raw[~np.isfinite(values).all(-1)] = 0
    return Blocks(kind, (rows, columns), raw.reshape(rows, -1))


# ---- compiled kernels give the bits of the definition ------------------------------------------


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", OPS)
def test_kernels_give_the_bits_of_the_definition(op: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    random = np.random.default_rng(m)
    x, w, bias = activations(random, m, k), weight(op, random, n, k), normal(random, n)
    for ins in ((x, w), (to_bf16(x), w), (x, to_bf16(w)), (to_bf16(x), to_bf16(w))):
        check_kernels(op, *ins)
        if op == "matmul_int8":
            check_kernels(op, *ins, bias)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("op", OPS)
def test_quantized_weights(op: str, kind: str) -> None:
    """A row holds whole blocks; the axis that the product sums over need not."""
    type_, random = type_by_name(kind), np.random.default_rng(2)
    shapes = [(5, 256), (70, 512), (300, 768)] + [(77, 96), (9, 352)] * (type_.block_size <= 32)
    for rows, columns in shapes:
        w = encode(normal(random, rows, columns), type_)
        bias = [normal(random, rows)] * (op == "matmul_int8")
        for m in (1, 100):
            x = activations(random, m, columns if op == "matmul_int8" else rows)
            check_kernels(op, x, w)
            check_kernels(op, to_bf16(x), w, *bias)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("number", sorted(COMPILED), ids=lambda number: TYPES[number].name)
def test_quantized_weights_of_any_bytes(number: int) -> None:
    """Every type, with scales from nothing to the largest half float."""
    w = any_bytes(TYPES[number], 40, 512)
    for op, k in (("matmul_int8", 512), ("matmul_nn_int8", 40)):
        check_kernels(op, normal(np.random.default_rng(3), 20, k), w)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("op", OPS)
def test_a_weight_of_a_file_is_read_at_any_address(op: str) -> None:
    """It lies where the file has it, and cannot be written."""
    random = np.random.default_rng(4)
    w = encode(normal(random, 256, 256), type_by_name("Q4_K"))
    memory = np.empty(w.raw.size + 1, np.uint8)[1:]
    memory[:] = w.raw.ravel()
    memory.flags.writeable = False
    check_kernels(op, normal(random, 9, 256), Blocks(w.kind, w.shape, memory.reshape(w.raw.shape)))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("op", OPS)
def test_leading_axes_are_further_rows(op: str) -> None:
    random = np.random.default_rng(5)
    x, w = normal(random, 2, 3, 5, 300), weight(op, random, 20, 300)
    check_kernels(op, x, w)
    assert_same_bits(run_compiled(op, x, w).reshape(30, 20), run_compiled(op, x.reshape(30, 300), w))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("op", OPS)
def test_what_does_not_fit_is_packed_in_parts(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "largest_slice", lambda mode: matmul.Slice(64, 256))
    monkeypatch.setattr(matmul, "MAX_PACKED_BYTES", 40_000)
    random = np.random.default_rng(6)
    for m, n, k in ((70, 50, 1300), (50, 270, 520)):
        x, w = activations(random, m, k), weight(op, random, n, k)
        check_kernels(op, x, w)
        if op == "matmul_int8":
            check_kernels(op, x, w, normal(random, n))


# ---- weights that are packed once --------------------------------------------------------------


def check_copy(op: str, x: np.ndarray, w: np.ndarray | Blocks, *bias: np.ndarray) -> None:
    wanted, across = run_reference(op, x, w, *bias), int(op == "matmul_nn_int8")
    for threads in (1, 3):
        raw = pack_weight(w, across, threads)
        assert raw.shape == packed_type(w.shape, across).storage_shape(w.shape)
        assert_same_bits(run_compiled(op, x, PackedWeight(w.shape, raw), *bias, threads=threads), wanted)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("shape", [*SHAPES, (2, 700, 600), (700, 40, 1300)])
@pytest.mark.parametrize("op", OPS)
def test_packed_weights_give_the_same_bits(op: str, shape: tuple[int, int, int]) -> None:
    """Also those that are larger than the activations."""
    m, n, k = shape
    random = np.random.default_rng(m)
    x, w = activations(random, m, k), weight(op, random, n, k)
    check_copy(op, x, w, *[normal(random, n)] * (op == "matmul_int8"))
    check_copy(op, to_bf16(x), to_bf16(w))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("op", OPS)
def test_packed_weights_of_files(op: str, kind: str) -> None:
    random = np.random.default_rng(2)
    w = encode(normal(random, 300, 768), type_by_name(kind))
    for m in (1, 100, 900):
        check_copy(op, activations(random, m, w.shape[op == "matmul_int8"]), w)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("op", OPS)
def test_packed_weights_beside_activations_that_are_packed_in_parts(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "largest_slice", lambda mode: matmul.Slice(64, 256))
    monkeypatch.setattr(matmul, "MAX_PACKED_BYTES", 20_000)
    random = np.random.default_rng(6)
    for m, n, k in ((70, 150, 1300), (150, 70, 520)):
        check_copy(op, activations(random, m, k), weight(op, random, n, k))


# ---- how far a product is from float64 ---------------------------------------------------------


def blocks_of(x: np.ndarray) -> np.ndarray:
    """Rows in blocks that share a scale, in float64; the last is filled with zeros."""
    filled = np.zeros((len(x), -(-x.shape[1] // int8.BLOCK) * int8.BLOCK))
    filled[:, : x.shape[1]] = x
    return filled.reshape(len(x), -1, int8.BLOCK)


def in_fours(x: np.ndarray) -> np.ndarray:
    """Reorder rows so that those whose products are added in 16 bits are neighbors, or back.

    They are the first pair of each half of eight elements, and the second pair of each half.
    """
    return x.reshape(*x.shape[:-1], -1, 2, 2, 2).swapaxes(-2, -3).reshape(x.shape)


def steps(x: np.ndarray, added: int, limit: int) -> np.ndarray:
    """The distance of two neighboring integers, for each element; twice what is rounded to zero."""
    largest = abs(in_fours(blocks_of(x))).reshape(len(x), -1, int8.BLOCK // added, added).sum(-1).max(-1)
    step = np.where(largest < int8.SMALLEST, 2 * largest, largest / limit)
    return np.repeat(step, int8.BLOCK, axis=1)[:, : x.shape[1]]


def check_error(op: str, x: np.ndarray, w: np.ndarray, y: np.ndarray) -> None:
    """An activation is off by half a step, or by a step where it is rounded at random; a weight by half a step."""
    x, w = x.astype(np.float64), orient(op, w).astype(np.float64)
    dx = steps(x, 1, int8.LARGEST) * (1 if op == "matmul_nn_int8" else 0.5)
    dw = steps(w, 4, int8.LARGEST_SUM) * 0.5
    bound = dx @ abs(w).T + abs(x) @ dw.T + dx @ dw.T
    bound += 1e-6 * (abs(x) + dx) @ (abs(w) + dw).T + 1e-44  # float32, and its smallest numbers
    assert np.isfinite(y).all()
    error = abs(y - x @ w.T)
    assert (error <= bound).all(), (error / bound).max()


@pytest.mark.parametrize("op", OPS)
def test_products_are_within_the_error_of_rounding(op: str, multiply: Multiply) -> None:
    random = np.random.default_rng(7)
    for m, n, k in SHAPES:
        x, w = activations(random, m, k), weight(op, random, n, k)
        check_error(op, x, w, multiply(op, x, w))


@pytest.mark.parametrize("op", OPS)
def test_products_of_normal_values_are_close(op: str, multiply: Multiply) -> None:
    random = np.random.default_rng(8)
    x, w = normal(random, 200, 1024), normal(random, 100, 1024)
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    error = np.linalg.norm(multiply(op, x, orient(op, w)) - exact) / np.linalg.norm(exact)
    assert 1e-3 < error < 0.03  # 0.018 to 0.023


def odd_rows(k: int) -> np.ndarray:
    """Rows of zeros, of tiny values, and with one huge value; at the ends of a block, too."""
    random = np.random.default_rng(9)
    made = []
    for size in (
        0,
        1,
        1e-30,
        2.0**-120,
        np.nextafter(np.float32(2.0**-120), np.float32(0)),
        1e-36,
        1e-38,
        1e-44,
    ):
        made += [np.full(k, size), random.standard_normal(k) * size]
    for place in (0, 255, 256, k - 1):
        for size in (1.0, 1e-30, 1e-38):
            row = random.standard_normal(k) * size
            row[place] = 1e30
            made.append(row)
    return np.array(made, np.float32)


@pytest.mark.parametrize("op", OPS)
def test_zeros_tiny_values_and_one_huge_value(op: str, multiply: Multiply) -> None:
    """Of activations, of weights, and of both where their product is a number."""
    k, random = 300, np.random.default_rng(10)
    odd, plain = odd_rows(k), normal(random, 20, k)
    tiny = odd[abs(odd).max(1) < 1e20]
    for x, w in ((odd, plain), (plain, odd), (odd, tiny), (tiny, odd)):
        w = orient(op, w)
        check_error(op, x, w, multiply(op, x, w))
    assert not multiply(op, np.zeros((5, k), np.float32), orient(op, odd)).any()
    assert not multiply(op, odd, orient(op, np.zeros((5, k), np.float32))).any()


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("op", OPS)
def test_odd_values_have_the_bits_of_the_definition(op: str) -> None:
    odd = odd_rows(300)
    for x in (odd, to_bf16(odd)):
        check_kernels(op, x, orient(op, odd))


# ---- integers fit ------------------------------------------------------------------------------


def weights_at_the_edge(k: int = 512) -> np.ndarray:
    """Rows whose fours have the largest sum, with values that round up."""
    random = np.random.default_rng(11)
    fours: list[list[float]] = [
        [31.5] * 4,
        [31.5, -31.5, 31.5, -31.5],
        [-31.5] * 4,
        [62.5, 0.5, 62.5, 0.5],
        [125.5, 0.5, 0, 0],
        [126, 0, 0, 0],
        [-124.5, 0.5, 0.5, 0.5],
        [41.5, -41.5, 42.5, 0.5],
    ]
    rows = [np.tile(four, k // 4) for four in fours]
    cuts = np.sort(random.integers(0, 126, (40, k // 4, 3)), axis=-1)
    parts = np.diff(cuts, axis=-1, prepend=0, append=125)  # four whole numbers whose sum is 125
    rows += [*(parts * random.choice([-1, 1], parts.shape)).reshape(40, k)]
    halves = parts // 2 + 0.5
    rows += [*(halves * random.choice([-1, 1], parts.shape)).reshape(40, k)]
    huge = np.full(k, 0.5)
    huge[5] = 1e6
    rows += [huge, np.ones(k), -np.ones(k), np.tile([1.0, -1.0], k // 2)]
    sizes = np.array([1, 1 / 3, 0.007, 1e-20, 1e20])
    made = in_fours(np.array(rows) * sizes[:, None, None]).reshape(-1, k).astype(np.float32)
    more = [np.nextafter(made, np.float32(end)) for end in (np.inf, -np.inf)]
    return np.concatenate([made, *more])


def activations_at_the_edge(k: int = 512) -> np.ndarray:
    random = np.random.default_rng(12)
    signs = random.choice([-1.0, 1.0], (20, k))
    rows = [np.ones(k), -np.ones(k), np.tile([1.0, -1.0], k // 2), *signs]
    rows += [*np.clip(random.integers(-127, 127, (20, k)) + 0.5, -127, 127)]  # halfway between two integers
    sizes = np.array([1, 1 / 3, 0.007, 1e-20, 1e20])
    made = (np.array(rows) * sizes[:, None, None]).reshape(-1, k).astype(np.float32)
    more = [np.nextafter(made, np.float32(end)) for end in (np.inf, -np.inf)]
    return np.concatenate([made, *more])


@pytest.mark.parametrize("random_size", [None, 1e-3, 1.0, 1e10])
def test_sums_of_four_products_fit_16_bits(random_size: float | None) -> None:
    """For any activations: their bytes reach 255."""
    w = weights_at_the_edge()
    if random_size is not None:
        random = np.random.default_rng(13)
        w = normal(random, 2000, 512) * np.float32(random_size) * np.exp(normal(random, 2000, 1))
    integers, _ = int8.round_weight(w)
    assert (integers == np.rint(integers)).all() and abs(integers).max() <= 127
    sums = abs(in_fours(integers)).reshape(-1, 4).sum(-1)
    assert sums.max() * 255 <= 2**15 - 1
    assert sums.max() >= int8.LARGEST_SUM - 2  # most of the range is used


def test_activations_fit_their_bytes() -> None:
    for x in (activations_at_the_edge(), odd_rows(300), weights_at_the_edge()):
        for at_random in (False, True):
            integers, _ = int8.round_activations(x, at_random)
            assert (integers == np.rint(integers)).all()
            assert integers.min() >= -128 and integers.max() <= 127
            if not at_random:
                assert integers.min() >= -127


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("op", OPS)
def test_sums_at_the_edge_have_the_bits_of_the_definition(op: str) -> None:
    """No kernel saturates or overflows."""
    check_kernels(op, activations_at_the_edge(), orient(op, weights_at_the_edge()))


# ---- what is not a number ----------------------------------------------------------------------


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_not_a_number_stays_where_it_belongs(op: str, half: bool, multiply: Multiply) -> None:
    """A row with NaN or infinity gives NaN; so does a column whose weight has any."""
    random = np.random.default_rng(14)
    x, w = normal(random, 40, 600), normal(random, 30, 600)
    x[20] = 0
    places = {3: (7, np.nan), 12: (300, np.inf), 20: (599, -np.inf), 39: (0, -np.nan)}
    for row, (column, value) in places.items():
        x[row, column] = value
    w[5, 0], w[29, 599] = np.nan, np.inf
    w = orient(op, w)
    y = multiply(op, to_bf16(x) if half else x, to_bf16(w) if half else w)
    wanted = np.zeros(y.shape, bool)
    wanted[list(places)], wanted[:, [5, 29]] = True, True
    np.testing.assert_array_equal(np.isnan(y), wanted)
    assert np.isfinite(y[~wanted]).all()


def test_every_place_of_a_row_is_looked_at(multiply: Multiply) -> None:
    for op in OPS:
        w = orient(op, normal(np.random.default_rng(15), 3, 300))
        for value in (np.nan, np.inf, -np.inf):
            x = np.zeros((300, 300), np.float32)
            np.fill_diagonal(x, value)
            assert np.isnan(multiply(op, x, w)).all()
            tall = orient(op, x)
            assert np.isnan(multiply(op, np.ones((2, 300), np.float32), tall)).all()


# ---- rounding at random ------------------------------------------------------------------------


def round_at_random(multiply: Multiply, y: np.ndarray) -> np.ndarray:
    """The integers of rows of 255 values below 127, whose scale is 1: a weight that changes nothing shows them."""
    rows = np.concatenate([np.full((len(y), 1), 127, np.float32), y.astype(np.float32)], axis=1)
    found = multiply("matmul_nn_int8", rows, np.eye(rows.shape[1], dtype=np.float32))
    np.testing.assert_allclose(found, np.rint(found), atol=1e-4)
    assert (np.rint(found[:, 0]) == 127).all()
    return np.rint(found[:, 1:])


@pytest.mark.parametrize("value", [0.1, 0.5, 0.9, -0.1, -0.5, -0.9, 5.25, -60.75, 100.3, -126.5, 1e-3])
def test_rounding_at_random_is_unbiased(value: float, multiply: Multiply) -> None:
    """The mean of a million draws is within 5 standard errors."""
    value = float(np.float32(value))
    drawn = round_at_random(multiply, np.full((DRAWS, 255), value))
    assert drawn.size > 10**6 and set(np.unique(drawn)) <= {np.floor(value), np.ceil(value)}
    share = value - np.floor(value)
    error = (share * (1 - share) / drawn.size) ** 0.5
    assert abs(drawn.mean() - value) <= 5 * error


def test_products_are_unbiased(multiply: Multiply) -> None:
    """The mean over many rows that are the same is the product of what was not rounded."""
    random = np.random.default_rng(16)
    y, w = normal(random, 1, 500) * np.float32(1e-5), normal(random, 500, 8)
    products = multiply("matmul_nn_int8", np.repeat(y, DRAWS, axis=0), w).astype(np.float64)
    integers, scale = int8.round_weight(np.ascontiguousarray(w.T))
    rounded = (integers * scale[..., None].astype(np.float64)).reshape(8, -1)[:, :500]
    error = products.std(axis=0) / DRAWS**0.5
    assert (abs(products.mean(axis=0) - y[0].astype(np.float64) @ rounded.T) <= 5 * error).all()


def test_the_same_values_draw_the_same_numbers(multiply: Multiply) -> None:
    y = np.random.default_rng(17).uniform(-100, 100, (64, 255))
    assert round_at_random(multiply, y).tobytes() == round_at_random(multiply, y).tobytes()


def largest_correlation(rows: np.ndarray) -> float:
    return float(abs(np.corrcoef(rows) - np.eye(len(rows))).max())


def test_rows_and_columns_draw_different_numbers(multiply: Multiply) -> None:
    drawn = round_at_random(multiply, np.full((4000, 255), 0.5)) - 0.5
    for each in (drawn[:150], drawn.T):  # each row of values that are +-0.5
        assert largest_correlation(each) < 6 / each.shape[1] ** 0.5
    assert abs(drawn.mean(0)).max() < 3 / 4000**0.5 and abs(drawn.mean(1)).max() < 3 / 255**0.5


def test_blocks_draw_different_numbers() -> None:
    """Also those of a row that have the same largest value."""
    fractions = int8.draw_fractions(np.ones((2000, 6), np.float32))
    assert fractions.min() >= 0 and fractions.max() < 1
    assert largest_correlation(fractions[:, :, :40].reshape(2000, -1).T) < 6 / 2000**0.5
    assert largest_correlation(fractions[:300].reshape(300, -1)) < 6 / (6 * int8.BLOCK) ** 0.5


def test_whole_numbers_stay_as_they_are(multiply: Multiply) -> None:
    """Zero always; others but for one draw of 2^17, where float32 rounds their sum with a fraction up."""
    whole = np.tile(np.arange(-127, 128), (DRAWS, 1))
    moved = round_at_random(multiply, whole) - whole
    assert not moved[:, 127].any() and moved.min() >= 0 and moved.max() <= 1
    assert moved.mean() < 2.0**-17


# ---- in graphs ---------------------------------------------------------------------------------


class Adapted:
    """Two frozen weights after a trained one; the first has an adapter."""

    def __init__(self, precision: str = "f32", frozen: str | None = None) -> None:
        dtype = {} if frozen is None else {"dtype": quantized(frozen)}
        self.x, self.before = placeholder("x", (6, 64)), parameter("before", (64, 64))
        self.first, self.second = state("first", (96, 64), **dtype), state("second", (32, 96), **dtype)
        self.a, self.b = parameter("a", (4, 64)), parameter("b", (96, 4))
        x = ops.matmul(self.x, self.before)
        hidden = ops.add(ops.matmul(x, self.first), ops.matmul(ops.matmul(x, self.a), self.b))
        loss = ops.sum_sqr(ops.matmul(ops.silu(hidden), self.second))
        self.trained = [self.before, self.a, self.b]
        value, gradients = value_and_gradients(loss, self.trained)
        self.outputs = [value, *gradients]

    def arrays(self) -> dict[Tensor, np.ndarray]:
        random = np.random.default_rng(18)
        leaves = (self.x, self.first, self.second, *self.trained)
        return {leaf: normal(random, *leaf.shape) / np.float32(8) for leaf in leaves}


def products(outputs: Sequence[Tensor], *weights: Tensor) -> list[str]:
    """The ops of products that read one of these weights."""
    nodes = collect_nodes(outputs)
    return sorted(node.op.name for node in nodes if "matmul" in node.op.name and {*node.sources} & {*weights})


def count_ops(nodes: Iterable[Node]) -> Counter[str]:
    return Counter(node.op.name.removesuffix("_int8") for node in nodes)


def themselves(*weights: Tensor) -> dict[Tensor, tuple[Tensor, Tensor]]:
    """Each weight is read by both products."""
    return {weight: (weight, weight) for weight in weights}


def test_only_products_with_the_given_weights_change() -> None:
    made = Adapted()
    both = use_int8_products(made.outputs, themselves(made.first, made.second))
    assert products(both, made.first) == products(both, made.second) == ["matmul_int8", "matmul_nn_int8"]
    one = use_int8_products(made.outputs, themselves(made.second))
    assert products(one, made.first) == ["matmul", "matmul_nn"]
    assert products(one, made.second) == ["matmul_int8", "matmul_nn_int8"]
    for outputs in (both, one):
        for trained in made.trained:
            assert products(outputs, trained) == products(made.outputs, trained)
            assert not any("int8" in name for name in products(outputs, trained))
        nodes = collect_nodes(outputs)
        assert count_ops(nodes) == count_ops(collect_nodes(made.outputs))
        assert [node.op.name for node in nodes].count("out_prod") == 3
        assert [each.shape for each in outputs] == [each.shape for each in made.outputs]


def test_without_weights_nothing_changes() -> None:
    made = Adapted()
    found = use_int8_products(made.outputs, {})
    assert len(found) == len(made.outputs) and all(a is b for a, b in zip(found, made.outputs, strict=True))
    trained = use_int8_products(made.outputs, themselves(placeholder("other", (64, 64))))
    assert all(a is b for a, b in zip(trained, made.outputs, strict=True))


def test_gradients_follow_those_of_float32() -> None:
    """By all kernels that there are, the compiled ones on one thread and two."""
    made = Adapted()
    arrays, rewritten = made.arrays(), use_int8_products(made.outputs, themselves(made.first, made.second))
    exact = Program.build(made.outputs, arrays, kernels="reference")
    exact()
    found = []
    for kernels, threads in (("reference", 1), ("cpu", 1), ("cpu", 2)):
        program = Program.build(rewritten, arrays, kernels=kernels, threads=threads)
        program()
        found.append([program.read(output).copy() for output in rewritten])
        for value, output in zip(found[-1], made.outputs, strict=True):
            wanted = exact.read(output)
            assert 0 < np.linalg.norm(value - wanted) <= 0.05 * np.linalg.norm(wanted)
    for one, other in zip(found[1], found[2], strict=True):
        assert one.tobytes() == other.tobytes()


def test_activations_may_be_bf16_before_they_are_rounded() -> None:
    made = Adapted(frozen="Q8_0")
    outputs = round_products(use_int8_products(made.outputs, themselves(made.first, made.second)))
    nodes = [node for node in collect_nodes(outputs) if "int8" in node.op.name]
    assert len(nodes) == 4
    for node in nodes:
        assert node.sources[0].dtype is BF16 and node.sources[1] in (made.first, made.second)


def test_gradients_are_derived_before() -> None:
    x, w = parameter("x", (3, 32)), state("w", (8, 32))
    for y in (ops.matmul_int8(x, w), ops.matmul_nn_int8(parameter("y", (3, 8)), w)):
        assert y.node
        with pytest.raises(GraphError, match="replaces a product whose gradient exists"):
            value_and_gradients(ops.sum(y), [y.node.sources[0]])


def test_other_shapes_are_refused() -> None:
    x = placeholder("x", (2, 3, 32))
    assert ops.matmul_int8(x, state("w", (8, 32))).shape == (2, 3, 8)
    assert ops.matmul_nn_int8(x, state("w", (32, 8))).shape == (2, 3, 8)
    for op, shape in (
        (ops.matmul_int8, (2, 8, 32)),
        (ops.matmul_nn_int8, (2, 32, 8)),
        (ops.matmul_int8, (8, 31)),
    ):
        with pytest.raises(GraphError):
            op(x, state("w", shape))
