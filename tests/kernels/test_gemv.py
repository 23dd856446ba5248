"""Products of one row and a few, which pack nothing, against numpy in float64."""

import numpy as np
import pytest

from llamatrain.compiler.thread_pool import CallTable
from llamatrain.kernels.cpu import matmul
from llamatrain.kernels.cpu.gemv import MAX_ROWS, GemvPlan
from llamatrain.kernels.cpu.registry import BINDINGS
from tests.kernels.test_matmul import halved, normal, widened

UNTOUCHED = np.float32(7)


def product(x: np.ndarray, w: np.ndarray, *bias: np.ndarray) -> np.ndarray:
    """By one thread, the same bits by two; nothing is written beside it."""
    results = []
    for threads in (1, 2):
        around = np.full((*x.shape[:-1], len(w) + 2), UNTOUCHED, np.float32)
        out = np.ascontiguousarray(around[..., 1:-1])
        binding = BINDINGS["matmul"]
        assert isinstance(matmul.choose_matmul((x, w, *bias), threads), GemvPlan)
        room = np.full(binding.scratch([out], [x, w, *bias], {}, threads) + 64, 0xFF, np.uint8)
        CallTable(binding.bind([out], [x, w, *bias], {}, room[-room.ctypes.data % 64 :], threads), threads)()
        results.append(out)
    assert results[0].tobytes() == results[1].tobytes()
    return results[0]


@pytest.mark.parametrize(("x_half", "w_half"), [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 70, 5), (2, 33, 64), (3, 1000, 257), (1, 3000, 129)])
def test_in_both_precisions(shape: tuple[int, int, int], x_half: int, w_half: int) -> None:
    rows, n, k = shape
    x, w = normal(rows, k), normal(n, k)
    x, w = halved(x) if x_half else x, halved(w) if w_half else w
    found = product(x, w)
    x, w = (
        widened(halved(widened(each)) if x_half or w_half else each).astype(np.float64) for each in (x, w)
    )
    assert (abs(found - x @ w.T) <= 1e-6 * (abs(x) @ abs(w).T) + 1e-30).all()


@pytest.mark.parametrize("half", [False, True])
def test_a_bias_is_added_to_each_row(half: bool) -> None:
    x, w, bias = normal(3, 257), normal(71, 257), normal(71)
    w = halved(w) if half else w
    np.testing.assert_array_equal(product(x, w, bias), product(x, w) + bias)


def test_leading_axes_are_rows() -> None:
    x, w = normal(1, 3, 1, 40), normal(50, 40)
    np.testing.assert_allclose(product(x, w), x @ w.T, rtol=1e-5, atol=1e-5)


def test_each_row_is_the_same_alone() -> None:
    x, w = normal(MAX_ROWS, 300), normal(77, 300)
    together = product(x, w)
    assert all(product(x[i : i + 1], w).tobytes() == together[i : i + 1].tobytes() for i in range(MAX_ROWS))


def test_more_rows_a_weight_for_each_entry_or_nothing_to_add_are_packed() -> None:
    for x, w in (
        (normal(MAX_ROWS + 1, 8), normal(4, 8)),
        (normal(2, 1, 8), normal(2, 4, 8)),
        (normal(1, 0), normal(4, 0)),
    ):
        assert isinstance(matmul.choose_matmul((x, w), 2), matmul.Product)
