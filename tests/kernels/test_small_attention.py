"""Attention of small heads against the plain definition."""

import subprocess
import sys

import numpy as np
import pytest

from llamatrain.compiler.vectors import LANES
from llamatrain.kernels import reference
from llamatrain.kernels.cpu.small_attention import is_small
from tests.helpers.cli import environment
from tests.kernels.test_cpu_attention import normal, run

RANDOM = np.random.default_rng(1)


def check(q, k, v, *ranges, **how):
    (batch, length, heads, size), dout = q.shape, normal(*q.shape)
    assert is_small(q, k) == (size <= LANES)
    scale = size**-0.5
    wide = [each.astype(np.float64) for each in (dout, q, k, v)]
    with np.errstate(divide="ignore", invalid="ignore"):
        out, lse = reference.KERNELS["flash_attn"](*wide[1:], *ranges, scale=scale, **how)
        gradients = reference.KERNELS["flash_attn_back"](*wide, out, lse, *ranges, scale=scale, **how)
    ours = run("flash_attn", [q.shape, (batch, heads, length)], [q, k, v, *ranges], scale, **how)
    ours += run("flash_attn_back", [q.shape, k.shape, v.shape], [dout, q, k, v, *ours, *ranges], scale, **how)
    for got, wanted in zip(ours, (out, lse, *gradients), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1, 3, 4, 5, 8])
@pytest.mark.parametrize(
    "case",
    [
        (2, 32, 32, 4, 4),
        (1, 1, 1, 2, 1),
        (1, 21, 21, 6, 2),
        (3, 7, 50, 4, 1),
        (1, 128, 128, 2, 1),
        (1, 40, 9, 2, 2),
    ],
)
def test_causal(case, size):
    """Also with more queries than keys, the first of which see nothing."""
    batch, length, keys, heads, groups = case
    k, v = normal(batch, keys, groups, size), normal(batch, keys, groups, size)
    check(normal(batch, length, heads, size), k, v, np.zeros((batch, length), np.int32))


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 200])
@pytest.mark.parametrize(
    "case", [(2, 32, 32, 4, 4), (1, 1, 1, 2, 1), (3, 7, 50, 4, 1), (1, 128, 128, 2, 1), (1, 40, 9, 2, 2)]
)
def test_a_window(case, window):
    batch, length, keys, heads, groups = case
    k, v = normal(batch, keys, groups, 4), normal(batch, keys, groups, 4)
    check(normal(batch, length, heads, 4), k, v, np.zeros((batch, length), np.int32), window=window)


def test_packed_rows():
    starts = np.stack([[0] * 5 + [5] * 20 + [25] * 18, [0] * 43]).astype(np.int32)
    check(normal(2, 43, 4, 4), normal(2, 43, 2, 4), normal(2, 43, 2, 4), starts)


@pytest.mark.parametrize("size", [3, 8])
def test_lasts_and_queries_that_see_nothing(size):
    starts = RANDOM.integers(-3, 70, (3, 37)).astype(np.int32)
    lasts = starts + RANDOM.integers(-1, 40, (3, 37)).astype(np.int32)  # from nothing to beyond the end
    starts[0], lasts[0] = 5, 4
    check(normal(3, 37, 4, size), normal(3, 64, 2, size), normal(3, 64, 2, size), starts, lasts)
    check(normal(3, 37, 4, size), normal(3, 64, 2, size), normal(3, 64, 2, size), starts, lasts, window=9)


def test_what_is_not_a_number_shows_where_it_is_seen():
    q, k, v = normal(1, 20, 1, 4), normal(1, 20, 1, 4), normal(1, 20, 1, 4)
    k[0, 10] = np.nan
    out, lse = run("flash_attn", [q.shape, (1, 1, 20)], [q, k, v, np.zeros((1, 20), np.int32)], 1.0)
    assert np.isnan(out[0, 10:]).all() and np.isnan(lse[0, 0, 10:]).all() and np.isfinite(out[0, :10]).all()
    dq, dk, dv = run(
        "flash_attn_back", [q.shape] * 3, [q, q, k, v, out, lse, np.zeros((1, 20), np.int32)], 1.0
    )
    assert all(np.isnan(each[0, 10:]).all() for each in (dq, dk, dv))


NARROW = """
import platform
platform.machine = lambda: "aarch64"
from llamatrain.compiler.vectors import LANES
from llamatrain.kernels.cpu.small_attention import MAX_HEAD_SIZE
assert MAX_HEAD_SIZE <= LANES, (MAX_HEAD_SIZE, LANES)
"""


def test_a_row_is_one_vector_where_vectors_are_narrow() -> None:
    """As on ARM, where a vector has four numbers."""
    subprocess.run([sys.executable, "-c", NARROW], env=environment(), check=True)
