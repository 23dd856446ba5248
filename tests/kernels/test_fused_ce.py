"""The output head and its loss in one pass, against the formula in float64."""

import numpy as np
import pytest

from llamatrain.compiler.thread_pool import CallTable
from llamatrain.kernels.cpu import fused_ce
from llamatrain.kernels.cpu.registry import BINDINGS

RANDOM = np.random.default_rng(0)
BACK = "linear_cross_entropy_back"
SHAPES = [(1, 1, 1), (7, 13, 5), (50, 30, 33), (100, 33, 70), (70, 40, 4500)]  # tokens, width, words


def halved(x):
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widened(x):
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x


def case(count, width, words):
    x, w = RANDOM.standard_normal((count, width)), RANDOM.standard_normal((words, width)) * width**-0.5
    targets, weights = (
        RANDOM.integers(-1, words, count).astype(np.int32),
        RANDOM.random(count).astype(np.float32),
    )
    weights[::5] = 0
    return [x.astype(np.float32), w.astype(np.float32), targets, weights]


def run_once(op, outs, ins, attrs, threads):
    binding = BINDINGS[op]
    assert binding.takes(outs, ins, attrs)
    room = np.full(binding.scratch(outs, ins, attrs, threads) + 64, 0xFF, np.uint8)  # full of NaN
    CallTable(binding.bind(outs, ins, attrs, room[-room.ctypes.data % 64 :], threads), threads)()


def both(ins, dloss=0.5, dx=True, dw=True, **how):
    """loss, dx, dw: the same bits from one thread and from two, and the same loss without gradients."""
    results = []
    for threads in (1, 2):
        shapes = [(), *[ins[0].shape] * dx, *[ins[1].shape] * dw]
        outs = [np.full(shape, 7, np.float32) for shape in shapes]
        run_once(BACK, outs, [np.array(dloss, np.float32), *ins], {"dx": dx, "dw": dw, **how}, threads)
        results.append(outs)
    assert [each.tobytes() for each in results[0]] == [each.tobytes() for each in results[1]]
    alone = np.zeros((), np.float32)
    run_once("linear_cross_entropy", [alone], ins, how, 2)
    assert alone.tobytes() == results[0][0].tobytes()
    return results[0]


def formula(ins, dloss=0.5, cap=0.0):
    x, w, targets, weights = ins
    if np.uint16 in (x.dtype, w.dtype):
        x, w = (widened(halved(widened(each))) for each in (x, w))
    x, w = x.astype(np.float64), w.astype(np.float64)
    weights = np.where(targets < 0, 0, weights).astype(np.float64)
    logits, rows, slope = x @ w.T, np.arange(len(x)), 1.0
    if cap:
        logits = cap * np.tanh(logits / cap)
        slope = 1 - (logits / cap) ** 2
    log_sums = np.log(np.exp(logits).sum(1))
    slopes = np.exp(logits - log_sums[:, None])
    slopes[rows, targets] -= 1
    slopes *= dloss * weights[:, None] * slope
    return (weights * (log_sums - logits[rows, targets])).sum(), slopes @ w, slopes.T @ x


def close(got, wanted, within):
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(
            one, other, rtol=0, atol=within * max(1e-3, np.max(np.abs(other), initial=0))
        )


@pytest.mark.parametrize("shape", SHAPES)
def test_float32(shape):
    ins = case(*shape)
    close(both(ins), formula(ins), 1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("halves", [(1, 0), (0, 1), (1, 1)])
def test_bf16(shape, halves):
    ins = case(*shape)
    ins[:2] = [halved(each) if half else each for each, half in zip(ins[:2], halves, strict=True)]
    got, wanted = both(ins), formula(ins)
    close(got[:1], wanted[:1], 1e-6)  # the loss is of unrounded logits
    close(got[1:], wanted[1:], 1e-2)


@pytest.mark.parametrize(("half", "cap"), [(False, 0.7), (True, 0.7), (False, 30.0)])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_cap(shape, half, cap):
    ins = case(*shape)
    ins[1] = halved(ins[1]) if half else ins[1]
    got, wanted = both(ins, cap=cap), formula(ins, cap=cap)
    close(got[:1], wanted[:1], 1e-5)
    close(got[1:], wanted[1:], 1e-2 if half else 1e-5)
    dx_alone = both(ins, dw=False, cap=cap)[1]
    assert dx_alone.tobytes() == got[1].tobytes()
    assert not np.array_equal(got[0], both(ins)[0]) or shape == (1, 1, 1)


def test_under_a_cap_as_many_are_right_and_not_a_number_shows():
    x, w, targets, weights = case(60, 20, 50)
    judged = []
    for how in ({}, {"cap": 5.0}):
        outs = [np.zeros((), np.float32), np.zeros((), np.float32), np.zeros(60, np.float32)]
        run_once("linear_cross_entropy_judged", outs, [x, w, targets, weights], how, 2)
        assert outs[2].sum(dtype=np.float64) == pytest.approx(float(outs[0]), rel=1e-6)
        judged.append([float(each) for each in outs[:2]])
    assert judged[0][1] == judged[1][1] and judged[0][0] != judged[1][0]
    x[7, 3], targets[7], weights[7] = np.nan, 1, 1
    loss, dx, dw = both([x, w, targets, weights], cap=5.0)
    assert (
        np.isnan(loss)
        and np.isnan(dx[7]).all()
        and np.isfinite(np.delete(dx, 7, 0)).all()
        and np.isnan(dw).all()
    )


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_chunks_of_tokens(dtype, monkeypatch):
    ins = case(100, 40, 130)
    ins[1] = halved(ins[1]) if dtype == np.uint16 else ins[1]
    whole = both(ins)
    monkeypatch.setattr(fused_ce, "MAX_CHUNK_ROWS", 32)
    parts = both(ins)
    assert whole[0] == parts[0] and whole[1].tobytes() == parts[1].tobytes()
    close(parts[2:], whole[2:], 1e-6)


def test_only_what_is_asked_for():
    ins = case(30, 20, 50)
    loss, dx, dw = both(ins)
    assert [each.tobytes() for each in both(ins, dw=False)] == [loss.tobytes(), dx.tobytes()]
    assert [each.tobytes() for each in both(ins, dx=False)] == [loss.tobytes(), dw.tobytes()]


def test_a_token_without_target_or_weight_brings_nothing_even_if_it_is_not_a_number():
    ins = case(40, 20, 50)
    ins[2][3], ins[3][4] = -1, 0
    wanted = formula(ins)
    ins[0][3:5] = 1e30
    loss, dx, _ = both(ins)
    close([loss], wanted[:1], 1e-5)
    assert not dx[3:5].any()


def test_not_a_number_shows_in_the_loss():
    for bad in (np.nan, np.inf):
        ins = case(40, 20, 50)
        ins[2][:], ins[3][:] = 1, 1
        ins[0][7, 3] = bad
        loss, dx, dw = both(ins)
        assert (
            np.isnan(loss)
            and np.isnan(dx[7]).all()
            and np.isfinite(np.delete(dx, 7, 0)).all()
            and np.isnan(dw).all()
        )


def test_large_logits_do_not_overflow():
    ins = case(40, 20, 50)
    ins[1] *= 100
    close(both(ins)[:1], formula(ins)[:1], 1e-5)


def test_no_tokens():
    loss, dx, dw = both(case(0, 20, 50))
    assert loss == 0 and dx.size == 0 and not dw.any()


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_memory_stays_under_40_mb(dtype):
    x, w = (np.broadcast_to(dtype(0), shape) for shape in ((2048, 512), (32000, 512)))
    assert fused_ce.make_loss([x, w], {"dx": True, "dw": True}, 2).scratch < 40e6


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("how", [{}, {"cap": 2.0}])
def test_the_loss_of_each_row(shape, half, how):
    """Together they are the weighted sum's; what is given back for them is what their weights bring."""
    x, w, targets, weights = case(*shape)
    w = halved(w) if half else w
    apart = []
    for threads in (1, 2):
        apart.append(np.full(len(x), 7, np.float32))
        run_once("linear_cross_entropy_rows", [apart[-1]], [x, w, targets], how, threads)
    assert apart[0].tobytes() == apart[1].tobytes() and not apart[0][targets < 0].any()
    loss, dx, dw = both([x, w, targets, weights], dloss=1, **how)
    np.testing.assert_allclose((apart[0].astype(np.float64) * weights).sum(), loss, rtol=1e-5)
    found = [np.empty_like(dx), np.empty_like(dw)]
    run_once(
        "linear_cross_entropy_rows_back", found, [weights, x, w, targets], {"dx": True, "dw": True, **how}, 2
    )
    assert [each.tobytes() for each in found] == [dx.tobytes(), dw.tobytes()]
