"""Compiled attention against its formula in float64."""

import os
import subprocess
import sys

import numpy as np
import pytest

from llamatrain.kernels.cpu import attention  # noqa: F401 - it registers
from llamatrain.kernels.cpu.binding import BINDINGS
from llamatrain.machine.threads import Table

RANDOM = np.random.default_rng(0)
SWITCHED = "LLAMATRAIN_WITHOUT" in os.environ


def run(op, shapes, ins, scale):
    """The results of one thread, the same bits from two."""
    results = []
    for threads in (1, 2):
        outs, binding = [np.full(shape, 7, np.float32) for shape in shapes], BINDINGS[op]
        assert binding.takes(outs, ins, {"scale": scale})
        room = np.full(binding.scratch(outs, ins, {"scale": scale}, threads) + 64, 0xFF, np.uint8)  # full of NaN
        Table(binding.bind(outs, ins, {"scale": scale}, room[-room.ctypes.data % 64 :], threads), threads)()
        results.append(outs)
    assert [each.tobytes() for each in results[0]] == [each.tobytes() for each in results[1]]
    return results[0]


def rounded(x):
    """bfloat16, and what it stands for."""
    bits = x.view(np.uint32)
    half = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return half, (half.astype(np.uint32) << 16).view(np.float32)


def formula(dout, q, k, v, starts, lasts, scale):
    """out, lse, dq, dk, dv"""
    dout, q, k, v = (np.moveaxis(each.astype(np.float64), 2, 1) for each in (dout, q, k, v))
    groups, group = k.shape[1], q.shape[1] // k.shape[1]
    k, v = (np.repeat(each, group, 1) for each in (k, v))
    key = np.arange(k.shape[2])
    sees = ((key >= starts[..., None]) & (key <= lasts[..., None]))[:, None]
    e = np.where(sees, np.exp(q @ np.swapaxes(k, 2, 3) * scale), 0)
    total = e.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.log(total)[..., 0]
    p = e / np.where(total == 0, 1, total)
    out = p @ v
    ds = p * (dout @ np.swapaxes(v, 2, 3) - (dout * out).sum(-1, keepdims=True)) * scale
    dk, dv = (np.swapaxes(each, 2, 3) @ other for each, other in ((ds, q), (p, dout)))
    dk, dv = (each.reshape(len(each), groups, group, *each.shape[2:]).sum(2) for each in (dk, dv))
    return np.moveaxis(out, 1, 2), lse, *(np.moveaxis(each, 1, 2) for each in (ds @ k, dk, dv))


def check(q, k, v, starts, lasts, half=False):
    (batch, length, heads, _), scale = q.shape, q.shape[3] ** -0.5
    dout = RANDOM.standard_normal(q.shape).astype(np.float32)
    sources, within = [q, k, v], 2e-5
    if half:
        sources, (q, k, v), within = *zip(*map(rounded, (q, k, v)), strict=True), 1.5e-2
    given = [] if lasts is None else [lasts]
    if lasts is None:
        lasts = np.broadcast_to(np.arange(length) + k.shape[1] - length, starts.shape)
    out, lse, *gradients = formula(dout, q, k, v, starts, lasts, scale)
    got = run("flash_attn", [q.shape, (batch, heads, length)], [*sources, starts, *given], scale)
    assert np.isinf(got[1][np.isinf(lse)]).all()
    got += run("flash_attn_back", [q.shape, k.shape, v.shape], [dout, *sources, *got, starts, *given], scale)
    for ours, wanted in zip(got, (out, np.where(np.isinf(lse), got[1], lse), *gradients), strict=True):
        finite = np.isfinite(wanted)
        np.testing.assert_allclose(ours[finite], wanted[finite], rtol=0, atol=within * max(1, np.abs(wanted[finite]).max()))


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


@pytest.mark.skipif(SWITCHED, reason="this is the process that was asked for")
def test_without_avx512():
    environment = {**os.environ, "LLAMATRAIN_WITHOUT": "amx,avx512bf16,avx512"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
