"""Compiled attention against its formula in float64."""

import numpy as np
import pytest

from llamatrain.compiler.thread_pool import CallTable
from llamatrain.kernels.cpu import attention  # noqa: F401 - it registers
from llamatrain.kernels.cpu.registry import BINDINGS

RANDOM = np.random.default_rng(0)


def run(op, shapes, ins, scale, **how):
    """The results of one thread, the same bits from two."""
    results, attrs = [], {"scale": scale, **how}
    for threads in (1, 2):
        outs, binding = [np.full(shape, 7, np.float32) for shape in shapes], BINDINGS[op]
        assert binding.takes(outs, ins, attrs)
        room = np.full(binding.scratch(outs, ins, attrs, threads) + 64, 0xFF, np.uint8)  # full of NaN
        CallTable(binding.bind(outs, ins, attrs, room[-room.ctypes.data % 64 :], threads), threads)()
        results.append(outs)
    assert [each.tobytes() for each in results[0]] == [each.tobytes() for each in results[1]]
    return results[0]


def rounded(x):
    """bfloat16, and what it stands for."""
    bits = x.view(np.uint32)
    half = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return half, (half.astype(np.uint32) << 16).view(np.float32)


def formula(dout, q, k, v, starts, lasts, scale, window=0, cap=0.0):
    """out, lse, dq, dk, dv"""
    dout, q, k, v = (np.moveaxis(each.astype(np.float64), 2, 1) for each in (dout, q, k, v))
    groups, group = k.shape[1], q.shape[1] // k.shape[1]
    k, v = (np.repeat(each, group, 1) for each in (k, v))
    key = np.arange(k.shape[2])
    sees = ((key >= starts[..., None]) & (key <= lasts[..., None]))[:, None]
    sees &= (key > lasts[..., None] - (window or 1 << 20))[:, None]
    scores, slope = q @ np.swapaxes(k, 2, 3) * scale, 1.0
    if cap:
        scores = cap * np.tanh(scores / cap)
        slope = 1 - (scores / cap) ** 2
    e = np.where(sees, np.exp(scores), 0)
    total = e.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.log(total)[..., 0]
    p = e / np.where(total == 0, 1, total)
    out = p @ v
    ds = p * (dout @ np.swapaxes(v, 2, 3) - (dout * out).sum(-1, keepdims=True)) * scale * slope
    dk, dv = (np.swapaxes(each, 2, 3) @ other for each, other in ((ds, q), (p, dout)))
    dk, dv = (each.reshape(len(each), groups, group, *each.shape[2:]).sum(2) for each in (dk, dv))
    return np.moveaxis(out, 1, 2), lse, *(np.moveaxis(each, 1, 2) for each in (ds @ k, dk, dv))


def check(q, k, v, starts, lasts, half=False, scale=None, **how):
    (batch, length, heads, _), scale = q.shape, scale or q.shape[3] ** -0.5
    dout = RANDOM.standard_normal(q.shape).astype(np.float32)
    sources, within = [q, k, v], 2e-5
    if half:
        sources, (q, k, v), within = *zip(*map(rounded, (q, k, v)), strict=True), 1.5e-2
    given = [] if lasts is None else [lasts]
    if lasts is None:
        lasts = np.broadcast_to(np.arange(length) + k.shape[1] - length, starts.shape)
    out, lse, *gradients = formula(dout, q, k, v, starts, lasts, scale, **how)
    got = run("flash_attn", [q.shape, (batch, heads, length)], [*sources, starts, *given], scale, **how)
    assert np.isinf(got[1][np.isinf(lse)]).all()
    got += run(
        "flash_attn_back", [q.shape, k.shape, v.shape], [dout, *sources, *got, starts, *given], scale, **how
    )
    for ours, wanted in zip(got, (out, np.where(np.isinf(lse), got[1], lse), *gradients), strict=True):
        finite = np.isfinite(wanted)
        np.testing.assert_allclose(
            ours[finite], wanted[finite], rtol=0, atol=within * max(1, np.abs(wanted[finite]).max())
        )


def normal(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


CASES = [
    (1, 1, 1, 1, 1, 1),
    (2, 32, 32, 8, 8, 4),
    (1, 70, 70, 4, 2, 48),
    (2, 64, 200, 2, 1, 80),
    (1, 300, 300, 2, 2, 64),
    (1, 5, 130, 6, 2, 256),
    (1, 3, 100, 8, 2, 17),
    (2, 1, 300, 4, 1, 64),
    (1, 129, 129, 10, 2, 33),
]


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_causal(case, half):
    batch, length, keys, heads, groups, size = case
    starts = np.zeros((batch, length), np.int32)
    k, v = normal(batch, keys, groups, size), normal(batch, keys, groups, size)
    check(normal(batch, length, heads, size), k, v, starts, None, half)


def test_packed_rows():
    """Several texts in one row: each query sees its own only."""
    cuts = np.array([0] * 50 + [50] * 13 + [63] * 100 + [163] * 37)
    starts = np.stack([cuts, np.zeros(200)]).astype(np.int32)
    q, k, v = (normal(2, 200, heads, 16) for heads in (4, 2, 2))
    check(q, k, v, starts, None)


@pytest.mark.parametrize("length", [2, 40])
def test_a_cache_with_free_places_and_queries_that_see_nothing(length):
    starts = RANDOM.integers(0, 200, (3, length)).astype(np.int32)
    lasts = starts + RANDOM.integers(-1, 150, (3, length)).astype(np.int32)  # from nothing to beyond the end
    starts[0], lasts[0] = 5, 4
    check(normal(3, length, 4, 20), normal(3, 250, 4, 20), normal(3, 250, 4, 20), starts, lasts)


@pytest.mark.parametrize("length", [3, 100])
def test_nan_shows(length):
    q, k, v = normal(1, length, 1, 8), normal(1, length, 1, 8), normal(1, length, 1, 8)
    q[0, 1] = np.nan
    starts = np.zeros((1, length), np.int32)
    out, lse = run("flash_attn", [q.shape, (1, 1, length)], [q, k, v, starts], 1.0)
    assert np.isnan(out[0, 1]).all() and np.isnan(lse[0, 0, 1]) and np.isfinite(out[0, [0, 2]]).all()
    dq, dk, _ = run("flash_attn_back", [q.shape, k.shape, v.shape], [out, q, k, v, out, lse, starts], 1.0)
    assert np.isnan(dq[0, 1]).all() and np.isfinite(dq[0, [0, 2]]).all() and np.isnan(dk[0, 0]).all()


def test_large_scores_do_not_overflow():
    q, k, v = 100 * normal(1, 80, 2, 16), 100 * normal(1, 80, 2, 16), normal(1, 80, 2, 16)
    out, lse = run("flash_attn", [q.shape, (1, 2, 80)], [q, k, v, np.zeros((1, 80), np.int32)], 0.25)
    scores = np.einsum("bihd,bjhd->bhij", *(each.astype(np.float64) for each in (q, k))) * 0.25
    scores = np.where(np.arange(80) <= np.arange(80)[:, None], scores, -np.inf)
    top = scores.max(-1)
    np.testing.assert_allclose(lse, top + np.log(np.exp(scores - top[..., None]).sum(-1)), rtol=1e-5)
    assert np.isfinite(out).all()


# ---- windows and caps ------------------------------------------------------


@pytest.mark.parametrize(
    ("half", "window"), [(False, 1), (True, 2), (False, 63), (True, 64), (False, 65), (True, 500)]
)
@pytest.mark.parametrize(
    "case", [(2, 200, 200, 4, 2, 16), (1, 65, 130, 2, 1, 80), (2, 1, 300, 2, 1, 40), (1, 7, 7, 3, 1, 1)]
)
def test_a_window(case, half, window):
    """As long as a block, about as long, and longer than the row; of few queries, too, and behind a cache."""
    batch, length, keys, heads, groups, size = case
    k, v = normal(batch, keys, groups, size), normal(batch, keys, groups, size)
    check(
        normal(batch, length, heads, size),
        k,
        v,
        np.zeros((batch, length), np.int32),
        None,
        half,
        window=window,
    )


@pytest.mark.parametrize(("half", "cap"), [(False, 2.0), (True, 2.0), (False, 50.0)])
@pytest.mark.parametrize(
    "case", [(1, 200, 200, 4, 2, 18), (1, 3, 100, 8, 2, 96), (2, 20, 20, 2, 2, 8), (1, 64, 64, 1, 1, 256)]
)
def test_a_cap(case, half, cap):
    """Also of heads that are small otherwise."""
    batch, length, keys, heads, groups, size = case
    k, v = normal(batch, keys, groups, size), normal(batch, keys, groups, size)
    q, starts = 3 * normal(batch, length, heads, size), np.zeros((batch, length), np.int32)
    check(q, k, v, starts, None, half, cap=cap, window=30)


def test_packed_rows_and_a_cache_with_window_and_cap():
    cuts = np.array([0] * 50 + [50] * 13 + [63] * 100 + [163] * 37)
    starts = np.stack([cuts, np.zeros(200)]).astype(np.int32)
    q, k, v = (normal(2, 200, heads, 10) for heads in (4, 2, 2))
    check(q, k, v, starts, None, window=20, cap=3.0)
    lasts = RANDOM.integers(-2, 260, (3, 40)).astype(np.int32)  # from nothing to beyond the end
    starts = np.maximum(0, lasts - RANDOM.integers(0, 90, (3, 40))).astype(np.int32)
    q, k, v = normal(3, 40, 4, 20), normal(3, 250, 4, 20), normal(3, 250, 4, 20)
    for scale in (0.2, 2.0):
        check(q, k, v, starts, lasts, window=33, cap=4.0, scale=scale)


def test_a_window_passes_over_whole_blocks_forward_and_back():
    """What lies there is not even looked at: nothing times what is not a number would be none."""
    length, window = 64 * 9, 70
    q, k, v, dout = (normal(1, length, 2, 16) for _ in range(4))
    starts = np.zeros((1, length), np.int32)
    attrs = {"window": window}
    out, lse = run("flash_attn", [q.shape, (1, 2, length)], [q, k, v, starts], 0.25, **attrs)
    wanted = run("flash_attn_back", [q.shape] * 3, [dout, q, k, v, out, lse, starts], 0.25, **attrs)
    block, key = 6, 64 * 4  # the queries of this block see no key before that one
    for each in (k, v):
        each[:, :key] = np.nan
    late = slice(64 * block, None)
    seen, sums = run("flash_attn", [q.shape, (1, 2, length)], [q, k, v, starts], 0.25, **attrs)
    assert (
        seen[:, late].tobytes() == out[:, late].tobytes()
        and sums[:, :, late].tobytes() == lse[:, :, late].tobytes()
    )
    dq, dk, dv = run("flash_attn_back", [q.shape] * 3, [dout, q, k, v, out, lse, starts], 0.25, **attrs)
    assert dq[:, late].tobytes() == wanted[0][:, late].tobytes()
    assert np.isnan(dq[:, : 64 * 4]).all()  # those who see it, see it
    for got, clean in ((dk, wanted[1]), (dv, wanted[2])):
        assert got[:, late].tobytes() == clean[:, late].tobytes()


@pytest.mark.parametrize("length", [3, 100])
def test_nan_shows_under_a_cap(length):
    q, k, v = normal(1, length, 1, 8), normal(1, length, 1, 8), normal(1, length, 1, 8)
    q[0, 1] = np.nan
    starts, attrs = np.zeros((1, length), np.int32), {"cap": 5.0, "window": 2}
    out, lse = run("flash_attn", [q.shape, (1, 1, length)], [q, k, v, starts], 1.0, **attrs)
    assert np.isnan(out[0, 1]).all() and np.isnan(lse[0, 0, 1]) and np.isfinite(out[0, [0, 2]]).all()
    dq, dk, _ = run(
        "flash_attn_back", [q.shape, k.shape, v.shape], [out, q, k, v, out, lse, starts], 1.0, **attrs
    )
    assert np.isnan(dq[0, 1]).all() and np.isfinite(dq[0, [0, 2]]).all() and np.isnan(dk[0, 0]).all()
