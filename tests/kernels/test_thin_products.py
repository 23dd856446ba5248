"""Products with a short axis: compiled kernels that read large matrices where they lie follow the definition."""

from typing import Any

import numpy as np
import pytest

from llamatrain.compiler.thread_pool import CallTable
from llamatrain.engine.device import is_compiled
from llamatrain.engine.program import Program
from llamatrain.graph import ops
from llamatrain.graph.tensor import collect_nodes, placeholder
from llamatrain.kernels.cpu import matmul
from llamatrain.kernels.cpu.device import CpuDevice
from llamatrain.kernels.cpu.registry import BINDINGS
from llamatrain.kernels.cpu.thin import SHORT, ThinPlan
from llamatrain.kernels.reference.registry import run_kernel

pytestmark = pytest.mark.skipif(
    not is_compiled("cpu"), reason="there are no compiled kernels for this machine"
)
UNTOUCHED = np.float32(7)
ROWS, WIDTHS, RANKS = (17, 40, 200), (32, 96, 1000, 2048), (1, 3, 8, 12, 16)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


def adapter_products(m: int, d: int, rank: int) -> dict[str, tuple[str, tuple[np.ndarray, ...]]]:
    """The six products of an adapter, and the four that are added to what is there."""
    x, h, a, b, dy = normal(m, d), normal(m, rank), normal(rank, d), normal(d, rank), normal(m, d)
    return {
        "x aᵀ": ("matmul", (x, a)),
        "h bᵀ": ("matmul", (h, b)),
        "dy b": ("matmul_nn", (dy, b)),
        "dh a": ("matmul_nn", (h, a)),
        "dhᵀ x": ("out_prod", (h, x)),
        "dyᵀ h": ("out_prod", (dy, h)),
        "y + h bᵀ": ("matmul_add", (dy, h, b)),
        "dx + dh a": ("matmul_nn_add", (dy, h, a)),
        "h + x aᵀ": ("matmul_add", (h, x, a)),
        "dh + dy b": ("matmul_nn_add", (h, dy, b)),
    }


def defined(op: str, ins: tuple[np.ndarray, ...]) -> np.ndarray:
    """The definition, in float64."""
    first, second = (each.astype(np.float64) for each in ins[-2:])
    left, right = (
        first.T if op == "out_prod" else first,
        second.T if op in ("matmul", "matmul_add") else second,
    )
    made: np.ndarray = left @ right
    return made + ins[0] if op.endswith("_add") else made


def compute(op: str, ins: tuple[np.ndarray, ...], threads: int, in_place: bool = False) -> np.ndarray:
    """Return a product; check that its kernel writes nothing beside it."""
    shape = defined(op, ins).shape
    around = np.full(int(np.prod(shape)) + 64, UNTOUCHED, np.float32)
    out = around[32:-32].reshape(shape)
    if in_place:
        out[...] = ins[0]
        ins = (out, *ins[1:])
    size = BINDINGS[op].scratch([out], ins, {}, threads)
    whole = np.full(size + 192, 0xFF, np.uint8)  # NaN, as float32
    scratch = whole[-whole.ctypes.data % 64 :][: size + 64]
    CallTable(BINDINGS[op].bind([out], ins, {}, scratch[:size], threads), threads)()
    assert (around[:32] == UNTOUCHED).all() and (around[-32:] == UNTOUCHED).all()
    assert (scratch[size:] == 0xFF).all()
    return out


@pytest.mark.parametrize("rank", RANKS)
def test_they_follow_the_definition(rank: int) -> None:
    for m in ROWS:
        for d in WIDTHS:
            for name, (op, ins) in adapter_products(m, d, rank).items():
                wanted = defined(op, ins)
                size = np.abs(wanted).max()
                np.testing.assert_allclose(
                    compute(op, ins, 2), wanted, rtol=0, atol=4e-6 * size, err_msg=f"{name} {m} {d}"
                )
                if op.endswith("_add"):
                    np.testing.assert_array_equal(compute(op, ins, 2, in_place=True), compute(op, ins, 2))


def test_threads_change_no_bits() -> None:
    for name, (op, ins) in adapter_products(300, 2048, 8).items():
        one = compute(op, ins, 1)
        for threads in (2, 3, 16):
            np.testing.assert_array_equal(compute(op, ins, threads), one, err_msg=name)


def test_nan_and_infinity_stay_where_they_belong() -> None:
    x, a, h = normal(40, 96), normal(8, 96), normal(40, 8)
    x[3, 5], x[7, 90], h[9, 2] = np.nan, np.inf, np.nan
    for op, ins in (
        ("matmul", (x, a)),
        ("matmul_nn", (h, a)),
        ("out_prod", (h, x)),
        ("matmul_nn_add", (x, h, a)),
    ):
        wanted, found = np.empty(defined(op, ins).shape, np.float32), compute(op, ins, 2)
        with np.errstate(invalid="ignore"):
            run_kernel(op, [wanted], ins, {})
        np.testing.assert_array_equal(np.isfinite(found), np.isfinite(wanted))


def test_only_short_axes_are_thin() -> None:
    """A few rows of a large weight are not: they would have it turned around."""

    def plan(op: str, *shapes: tuple[int, int]) -> Any:
        ins = [np.empty(shape, np.float32) for shape in shapes]
        return {
            "matmul": matmul.choose_matmul,
            "matmul_nn": matmul.matmul_nn_plan,
            "out_prod": matmul.out_prod_plan,
        }[op](ins, 2)

    assert isinstance(plan("matmul", (300, 512), (SHORT, 512)), ThinPlan)
    assert not isinstance(plan("matmul", (300, 512), (SHORT + 1, 512)), ThinPlan)
    assert not isinstance(plan("matmul", (8, 512), (512, 512)), ThinPlan)
    assert not isinstance(plan("matmul", (2, 512), (8, 512)), ThinPlan)
    assert not isinstance(plan("matmul", (300, 0), (8, 0)), ThinPlan)
    assert not isinstance(plan("matmul_nn", (300, 8), (8, 513)), ThinPlan)
    assert not isinstance(plan("out_prod", (300, 8), (300, 8)), ThinPlan)
    assert not isinstance(plan("out_prod", (300, 64), (300, 64)), ThinPlan)


def test_a_sum_with_an_adapters_product_is_one_node() -> None:
    """Of few rows and of many, and whether or not the other source is read again; other sums are left alone."""
    for m in (2, 64):
        shapes = {"base": (m, 96), "x": (m, 8), "w": (96, 8), "eye": (96, 96)}
        base, x, w, eye = (placeholder(name, shape) for name, shape in shapes.items())
        arrays = {base: normal(m, 96), x: normal(m, 8), w: normal(96, 8), eye: np.eye(96, dtype=np.float32)}
        y = ops.matmul(base, eye)
        for outputs in ([ops.add(ops.matmul(x, w), y)], [ops.add(y, ops.matmul(x, w)), ops.sqr(y)]):
            names = [node.op.name for node in collect_nodes(CpuDevice(1).rewrite(outputs))]
            assert "matmul_add" in names and "add" not in names
            found = Program.build(outputs, arrays, threads=2)
            found()
            values = defined("matmul_add", (arrays[base], arrays[x], arrays[w])), arrays[base] ** 2
            for output, wanted in zip(outputs, values, strict=False):
                np.testing.assert_allclose(found.read(output), wanted, rtol=0, atol=1e-5)
        for other in (ops.add(base, ops.matmul(x, w)), ops.add(y, ops.matmul(base, eye))):
            assert CpuDevice(1).rewrite([other])[0] is other
