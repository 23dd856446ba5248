"""The compiled kernels other than products, against formulas in float64."""

import numpy as np
import pytest

from llamatrain.compiler import vectors
from llamatrain.compiler.declare import F32, KernelEntry
from llamatrain.compiler.thread_pool import CallTable
from llamatrain.kernels.cpu import (
    reduce,  # noqa: F401 - they register
)
from llamatrain.kernels.cpu.registry import BINDINGS

RANDOM = np.random.default_rng(0)


def normal(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


def run_once(op, outs, ins, attrs, threads):
    binding = BINDINGS[op]
    assert binding.takes(outs, ins, attrs)
    scratch = np.full(binding.scratch(outs, ins, attrs, threads) + 64, 0xFF, np.uint8)
    scratch = scratch[-scratch.ctypes.data % 64 :]
    CallTable(binding.bind(outs, ins, attrs, scratch, threads), threads)()


def run(op, shapes, ins, over=None, dtype=np.float32, more=(), **attrs):
    """The results of one thread, the same bits from two; over: {output: source whose memory it takes}; more: (shape, dtype)."""
    results = []
    for threads in (1, 2):
        sources = [each.copy() for each in ins]
        outs = [np.full(shape, 7, kind) for shape, kind in (*((shape, dtype) for shape in shapes), *more)]
        for out, source in (over or {}).items():
            outs[out] = sources[source]
        run_once(op, outs, sources, attrs, threads)
        results.append(outs)
    for one, two in zip(*results, strict=True):
        assert one.tobytes() == two.tobytes()
    return results[0]


def close(got, wanted, within=2e-6):
    np.testing.assert_allclose(
        got, wanted, rtol=0, atol=within * max(1.0, np.nanmax(np.abs(wanted), initial=0))
    )


def wide(*arrays):
    return [array.astype(np.float64) for array in arrays]


@KernelEntry
def exponentials(lo, hi, thread, x: F32, alone: F32, together: F32):
    for i in range(lo, hi):
        alone[i] = vectors.exp(x[i])
    for i in range(lo, hi, vectors.LANES):
        vectors.store_until(together, i, hi, vectors.exp(vectors.load_until(x, i, hi)), 0)


def test_the_exponential():
    x = np.concatenate([RANDOM.uniform(-110, 95, 100_003), [-np.inf, np.inf, np.nan, 0, 88.7]]).astype(
        np.float32
    )
    alone, together = np.empty_like(x), np.empty_like(x)
    CallTable([exponentials.call(x, alone, together, items=x.size, block=x.size)], 1)()
    np.testing.assert_array_equal(alone, together)
    with np.errstate(over="ignore"):
        wanted = np.exp(x.astype(np.float64)).astype(np.float32)
    assert alone[-5:-1].tolist()[:2] == [0, np.inf] and np.isnan(alone[-3]) and alone[-2] == 1
    np.testing.assert_array_max_ulp(alone[np.isfinite(wanted)], wanted[np.isfinite(wanted)], 2)
    np.testing.assert_array_equal(np.isfinite(alone), np.isfinite(wanted))


@KernelEntry
def tangents(lo, hi, thread, x: F32, alone: F32, together: F32):
    for i in range(lo, hi):
        alone[i] = vectors.tanh(x[i])
    for i in range(lo, hi, vectors.LANES):
        vectors.store_until(together, i, hi, vectors.tanh(vectors.load_until(x, i, hi)), 0)


def test_the_hyperbolic_tangent():
    tiny = RANDOM.choice([-1, 1], 50_000) * np.exp(RANDOM.uniform(-80, 3, 50_000))
    x = np.concatenate([RANDOM.uniform(-12, 12, 100_003), tiny, [-np.inf, np.inf, np.nan, 0, 1e38]]).astype(
        np.float32
    )
    alone, together = np.empty_like(x), np.empty_like(x)
    CallTable([tangents.call(x, alone, together, items=x.size, block=x.size)], 1)()
    np.testing.assert_array_equal(alone, together)
    assert alone[-5:-3].tolist() == [-1, 1] and np.isnan(alone[-3]) and alone[-2:].tolist() == [0, 1]
    wanted = np.tanh(x.astype(np.float64)).astype(np.float32)
    np.testing.assert_array_max_ulp(alone[~np.isnan(x)], wanted[~np.isnan(x)], 4)
    assert (abs(alone[~np.isnan(x)]) <= 1).all()


SHAPES = [(1, 1), (3, 5), (2, 3, 16), (70, 100), (9, 1031), (300, 64)]


# ---- norm -------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_and_its_gradients(shape):
    x, dy, w, eps = normal(*shape), normal(*shape), normal(shape[-1]), 1e-5
    x64, dy64, w64 = wide(x, dy, w)
    r = 1 / np.sqrt((x64**2).mean(-1, keepdims=True) + eps)
    for over in ({}, {0: 0}):
        close(run("rms_norm", [shape], [x, w], over, eps=eps)[0], x64 * r * w64)
    n = x64 * r
    dn = dy64 * w64
    for over in ({}, {0: 0}, {0: 1}):
        dx, dw = run("rms_norm_back", [shape, w.shape], [dy, x, w], over, eps=eps)
        close(dx, r * (dn - n * (dn * n).mean(-1, keepdims=True)), 1e-5)
        close(dw, (dy64 * n).reshape(-1, shape[-1]).sum(0), 1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_layer_norm_and_its_gradients(shape):
    """Also of rows that lie far from 0."""
    x, dy, w, bias, eps = 5 + normal(*shape), normal(*shape), normal(shape[-1]), normal(shape[-1]), 1e-5
    x64, dy64, w64, bias64 = wide(x, dy, w, bias)
    middle = x64 - x64.mean(-1, keepdims=True)
    r = 1 / np.sqrt((middle**2).mean(-1, keepdims=True) + eps)
    for over in ({}, {0: 0}):
        close(run("layer_norm", [shape], [x, w], over, eps=eps)[0], middle * r * w64, 1e-5)
        close(run("layer_norm", [shape], [x, w, bias], over, eps=eps)[0], middle * r * w64 + bias64, 1e-5)
    n = middle * r
    dn = dy64 * w64
    dn = dn - dn.mean(-1, keepdims=True) - n * (dn * n).mean(-1, keepdims=True)
    for over in ({}, {0: 0}, {0: 1}):
        dx, dw = run("layer_norm_back", [shape, w.shape], [dy, x, w], over, eps=eps)
        close(dx, r * dn, 1e-5 if shape[-1] > 1 else 1e-3)
        close(dw, (dy64 * n).reshape(-1, shape[-1]).sum(0), 1e-5)


# ---- activations ------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_activations(shape):
    x, dy = 3 * normal(*shape), normal(*shape)
    x[..., 0], how = 0, {"positive": 0.8, "negative": 1.3, "beta": 0.5, "eps": -1e-6}
    x64, dy64 = wide(x, dy)
    above = np.maximum(x64, 0)
    close(run("relu_sqr", [shape], [x], {0: 0})[0], above**2)
    below = 1.3 * (np.expm1(np.minimum(x64, -1e-6)) - x64)
    close(run("xielu", [shape], [x], {0: 0}, **how)[0], np.where(x64 > 0, 0.8 * x64**2, below) + 0.5 * x64)
    slope = np.where(x64 > 0, 1.6 * x64, 1.3 * (np.where(x64 < -1e-6, np.exp(x64), 0) - 1)) + 0.5
    for over in ({}, {0: 0}, {0: 1}):
        close(run("relu_sqr_back", [shape], [dy, x], over)[0], 2 * dy64 * above)
        close(run("xielu_back", [shape], [dy, x], over, **how)[0], dy64 * slope)


def test_xielu_far_from_zero():
    x = np.array([-1e-30, -1e-7, -3e-6, -30.0, -1e4, 1e-30, 1e-3, 100.0, np.nan], np.float32)
    how = {"positive": 0.8, "negative": 1.3, "beta": 0.5, "eps": -1e-6}
    found, (x64,) = run("xielu", [x.shape], [x], **how)[0], wide(x)
    below = 1.3 * (np.expm1(np.minimum(x64, -1e-6)) - x64)
    np.testing.assert_allclose(
        found, np.where(x64 > 0, 0.8 * x64**2, below) + 0.5 * x64, rtol=1e-6, atol=1e-12
    )


# ---- gates ------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_gates(shape):
    gate, up, dy = 4 * normal(*shape), normal(*shape), normal(*shape)
    g, u, d = wide(gate, up, dy)
    s = 1 / (1 + np.exp(-g))
    slope = s * (1 + g * (1 - s))
    close(run("silu", [shape], [gate], {0: 0})[0], g * s)
    close(run("silu_back", [shape], [dy, gate], {0: 1})[0], d * slope)
    close(run("swiglu", [shape], [gate, up], {0: 1})[0], g * s * u)
    for over in ({}, {0: 1, 1: 2}, {0: 0}, {1: 0}):
        dgate, dup = run("swiglu_back", [shape, shape], [dy, gate, up], over)
        close(dgate, d * u * slope)
        close(dup, d * g * s)


@pytest.mark.parametrize("shape", SHAPES)
def test_relus_gate(shape):
    gate, up, dy = normal(*shape), normal(*shape), normal(*shape)
    gate.flat[::5] = np.resize(np.float32([0, -np.inf, 1e-42, -1e-42]), gate.flat[::5].shape)
    g, u, d = wide(gate, up, dy)
    above = np.maximum(g, 0)
    close(run("reglu", [shape], [gate, up], {0: 1})[0], above * u)
    for over in ({}, {0: 1, 1: 2}, {0: 0}, {1: 0}):
        dgate, dup = run("reglu_back", [shape, shape], [dy, gate, up], over)
        close(dgate, d * u * (g > 0))
        close(dup, d * above)


@pytest.mark.parametrize("shape", SHAPES)
def test_gelus_gate(shape):
    gate, up, dy = 4 * normal(*shape), normal(*shape), normal(*shape)
    g, u, d = wide(gate, up, dy)
    v, inner = np.sqrt(2 / np.pi) * (g + 0.044715 * g**3), np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * g**2)
    part = (1 + np.tanh(v)) / 2
    slope = part + g * inner / (2 * np.cosh(v) ** 2)
    close(run("gelu", [shape], [gate], {0: 0})[0], g * part)
    close(run("gelu_back", [shape], [dy, gate], {0: 1})[0], d * slope)
    close(run("geglu", [shape], [gate, up], {0: 1})[0], g * part * u)
    for over in ({}, {0: 1, 1: 2}, {0: 0}, {1: 0}):
        dgate, dup = run("geglu_back", [shape, shape], [dy, gate, up], over)
        close(dgate, d * u * slope)
        close(dup, d * g * part)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("half", [False, True])
def test_a_gate_of_halves_gives_the_bits_of_one_of_two(shape, half):
    gate, up, dy = 4 * normal(*shape), normal(*shape), normal(*shape)
    if half:
        gate, up = ((each.view(np.uint32) >> 16).astype(np.uint16) for each in (gate, up))
    dtype, x = gate.dtype, np.concatenate([gate, up], axis=-1)
    np.testing.assert_array_equal(
        run("swiglu_halves", [shape], [x], dtype=dtype)[0], run("swiglu", [shape], [gate, up], dtype=dtype)[0]
    )
    wanted = np.concatenate(run("swiglu_back", [shape, shape], [dy, gate, up], dtype=dtype), axis=-1)
    for over in ({}, {0: 1}):
        np.testing.assert_array_equal(
            run("swiglu_halves_back", [x.shape], [dy, x], over, dtype=dtype)[0], wanted
        )


@pytest.mark.parametrize("shape", SHAPES)
def test_a_soft_cap(shape):
    x, dy, cap = 40 * normal(*shape), normal(*shape), 30.0
    wanted = cap * np.tanh(x.astype(np.float64) / cap)
    y = run("softcap", [shape], [x], {0: 0}, cap=cap)[0]
    close(y, wanted)
    for over in ({}, {0: 0}, {0: 1}):
        close(run("softcap_back", [shape], [dy, y], over, cap=cap)[0], dy * (1 - (wanted / cap) ** 2))


@pytest.mark.parametrize("sizes", [(4, 2, 3), (1,), (64, 32, 96), (33, 1, 100)])
def test_columns_cut_and_joined(sizes):
    for dtype in (np.float32, np.uint16):
        x = RANDOM.integers(0, 30000, (3, 7, sum(sizes))).astype(np.uint16)
        x = x if dtype == np.uint16 else x.astype(np.float32)
        parts = np.split(x, np.cumsum(sizes)[:-1], axis=-1)
        made = run("split_columns", [part.shape for part in parts], [x], dtype=dtype, sizes=sizes)
        for got, wanted in zip(made, parts, strict=True):
            np.testing.assert_array_equal(got, wanted)
        np.testing.assert_array_equal(run("join_columns", [x.shape], parts, dtype=dtype)[0], x)
    parts = [normal(5, size) for size in sizes]
    (half,) = run("cast", [(5, sum(sizes))], [np.concatenate(parts, axis=-1)], dtype=np.uint16)
    np.testing.assert_array_equal(run("join_columns", [half.shape], parts, dtype=np.uint16)[0], half)


def test_infinities_and_nan_pass_through():
    x = np.array([np.nan, np.inf, -200, 200, 0], np.float32)
    y = run("silu", [x.shape], [x])[0]
    assert np.isnan(y[0]) and y[1] == np.inf and y[2] == 0 and y[3] == 200 and y[4] == 0
    row = np.array([[1, np.nan, 2], [1, -np.inf, 2], [-5000, -5001, -5002]], np.float32)
    y = run("soft_max", [row.shape], [row])[0]
    assert np.isnan(y[0]).all() and y[1, 1] == 0
    close(y[2], np.exp([0, -1, -2]) / np.exp([0, -1, -2]).sum())


# ---- rotation ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "size", "pairs"), [(1, 2, 1), (8, 4, 2), (2, 48, 24), (3, 64, 32), (2, 80, 20), (1, 7, 3)]
)
def test_rope(heads, size, pairs):
    x = normal(2, 5, heads, size)
    angles = RANDOM.uniform(-3, 3, (40, pairs))
    table = np.stack([np.cos(angles), np.sin(angles)], -1).astype(np.float32)
    positions = RANDOM.integers(0, 40, (2, 5)).astype(np.int32)
    even, odd = x[..., 0 : 2 * pairs : 2].astype(np.float64), x[..., 1 : 2 * pairs : 2].astype(np.float64)
    turn = np.exp(1j * angles[positions])[:, :, None] * (even + 1j * odd)
    wanted = x.astype(np.float64)
    wanted[..., 0 : 2 * pairs : 2], wanted[..., 1 : 2 * pairs : 2] = turn.real, turn.imag
    for over in ({}, {0: 0}):
        y = run("rope", [x.shape], [x, positions, table], over)[0]
        close(y, wanted)
    close(run("rope_back", [x.shape], [y, positions, table], {0: 0})[0], x)


@pytest.mark.parametrize(
    ("heads", "size", "pairs"), [(1, 2, 1), (8, 4, 2), (2, 48, 24), (3, 64, 32), (2, 80, 20), (1, 7, 3)]
)
def test_rope_of_halves(heads, size, pairs):
    """The same rotation, of elements that lie elsewhere."""
    x = normal(2, 5, heads, size)
    angles = RANDOM.uniform(-3, 3, (40, pairs))
    table = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    positions = RANDOM.integers(0, 40, (2, 5)).astype(np.int32)
    place = np.concatenate(
        [np.arange(2 * pairs).reshape(2, pairs).T.ravel(), np.arange(2 * pairs, size)]
    )  # i beside i + pairs
    beside = np.ascontiguousarray(np.swapaxes(table, 1, 2))
    for op in ("rope", "rope_back"):
        wanted = np.empty_like(x)
        wanted[..., place] = run(op, [x.shape], [np.ascontiguousarray(x[..., place]), positions, beside])[0]
        for over in ({}, {0: 0}):
            close(run(op, [x.shape], [x, positions, table], over, halves=True)[0], wanted)
    positions[0, 1], positions[1, 2] = 40, -1
    y = run("rope", [x.shape], [x, positions, table], halves=True)[0]
    assert np.isnan(y[[0, 1], [1, 2], :, : 2 * pairs]).all() and np.isfinite(y[0, 0]).all()


# ---- softmax and losses -------------------------------------------------------


def softmax64(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("shape", SHAPES)
def test_soft_max(shape):
    x, dy = 5 * normal(*shape), normal(*shape)
    y64 = softmax64(x.astype(np.float64))
    y = run("soft_max", [shape], [x], {0: 0})[0]
    close(y, y64)
    dx = y64 * (dy - (dy * y64).sum(-1, keepdims=True))
    for over in ({}, {0: 0}, {0: 1}):
        close(run("soft_max_back", [shape], [dy, y], over)[0], dx)


@pytest.mark.parametrize(("count", "words"), [(1, 1), (7, 5), (300, 100), (5, 3001)])
def test_cross_entropy(count, words):
    x, weights, dloss = 3 * normal(count, words), normal(count), np.full((), 0.7, np.float32)
    ids = RANDOM.integers(-1, words, count).astype(np.int32)
    distribution = np.abs(normal(count, words))
    x64, w64 = wide(x, weights)
    logs = np.log(softmax64(x64))
    one_hot = np.where(ids[:, None] == np.arange(words), 1.0, 0.0)
    for targets, p in ((ids, one_hot), (distribution, distribution.astype(np.float64))):
        loss = run("cross_entropy_loss", [()], [x, targets, weights])[0]
        close(loss, -(w64[:, None] * p * logs).sum(), 1e-5)
        dx = 0.7 * w64[:, None] * (p.sum(-1, keepdims=True) * np.exp(logs) - p)
        for over in ({}, {0: 1}):
            close(run("cross_entropy_loss_back", [x.shape], [dloss, x, targets, weights], over)[0], dx)


# ---- rows -----------------------------------------------------------------------


def test_rows_taken_and_added_back():
    w, ids = normal(50, 37), RANDOM.integers(0, 50, (3, 41)).astype(np.int32)
    np.testing.assert_array_equal(run("get_rows", [(3, 41, 37)], [w, ids])[0], w[ids])
    half = (w.view(np.uint32) >> 16).astype(np.uint16)
    whole = (half.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(run("get_rows", [(3, 41, 37)], [half, ids])[0], whole[ids])
    for rows_ in (50, 5000):
        dy, wanted = normal(3, 41, 37), np.zeros((rows_, 37))
        np.add.at(wanted, ids.reshape(-1), dy.reshape(-1, 37).astype(np.float64))
        close(run("get_rows_back", [(rows_, 37)], [dy, ids], rows=rows_)[0], wanted)


def test_rows_replaced():
    for dtype, shape in ((np.float32, (3, 7)), (np.uint16, (2, 13))):
        x = RANDOM.integers(0, 60000, (20, *shape)).astype(dtype)
        new, ids = RANDOM.integers(0, 60000, (4, *shape)).astype(dtype), np.array([3, 0, 3, 19], np.int32)
        wanted = x.copy()
        wanted[ids] = new
        for over in ({}, {0: 0}):
            np.testing.assert_array_equal(
                run("set_rows", [x.shape], [x, new, ids], over, dtype, into=bool(over))[0], wanted
            )


# ---- optimizers -------------------------------------------------------------------


def test_ten_steps_of_adamw():
    rate, beta1, beta2, eps, decay, factor = 1e-2, 0.9, 0.99, 1e-8, 0.1, 0.5
    w, m, v = normal(5003), np.zeros(5003, np.float32), np.zeros(5003, np.float32)
    w64, m64, v64 = wide(w, m, v)
    for step in range(1, 11):
        g = normal(5003)
        bias1, bias2 = 1 - beta1**step, 1 - beta2**step
        ins = [w, m, v, g, np.array([rate, bias1, bias2], np.float32), np.full((), factor, np.float32)]
        settings = {"beta1": beta1, "beta2": beta2, "eps": eps, "decay": decay}
        w, m, v = run("opt_step_adamw", [w.shape] * 3, ins, {0: 0, 1: 1, 2: 2}, **settings)
        g64 = factor * g.astype(np.float64)
        m64, v64 = beta1 * m64 + (1 - beta1) * g64, beta2 * v64 + (1 - beta2) * g64**2
        w64 = w64 * (1 - rate * decay) - rate / bias1 * m64 / (np.sqrt(v64 / bias2) + eps)
    close(w, w64)
    close(m, m64)


def test_steps_of_sgd():
    rate, momentum, decay, factor = 1e-2, 0.9, 0.1, 2.0
    w, m = normal(5003), np.zeros(5003, np.float32)
    w64, m64 = wide(w, m)
    for _ in range(3):
        g = normal(5003)
        ins = [w, m, g, np.array([rate, 0, 0], np.float32), np.full((), factor, np.float32)]
        w, m = run("opt_step_sgd", [w.shape] * 2, ins, {0: 0, 1: 1}, momentum=momentum, decay=decay)
        m64 = momentum * m64 + factor * g
        w64 = w64 * (1 - rate * decay) - rate * m64
    close(w, w64)


# ---- arithmetic, casts, sums ---------------------------------------------------------


PAIRS = [
    ((5, 1031), (5, 1031)),
    ((3, 7, 33), (33,)),
    ((3, 7, 33), ()),
    ((4000, 5), (4000, 1)),
    ((1, 33), (6, 33)),
    ((1,), (1,)),
    ((2, 3, 4), (1, 1, 4)),
    ((), (9000,)),
    ((6, 1), (1, 40)),
]


@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_arithmetic(left, right):
    x, y = normal(*left), normal(*right)
    shape = np.broadcast_shapes(left, right)
    over = {0: 0} if left == shape else {0: 1} if right == shape else {}
    with np.errstate(divide="ignore"):
        for name, function in (
            ("add", np.add),
            ("sub", np.subtract),
            ("mul", np.multiply),
            ("div", np.divide),
        ):
            np.testing.assert_allclose(run(name, [shape], [x, y], over)[0], function(x, y), rtol=1e-6)
    np.testing.assert_array_equal(run("scale", [left], [x], by=0.3)[0], x * np.float32(0.3))
    np.testing.assert_array_equal(run("sqr", [left], [x], {0: 0})[0], x * x)


def test_what_has_no_compiled_arithmetic():
    x, y = normal(2, 3, 4), normal(2, 1, 4)
    assert not BINDINGS["add"].takes([x], [x, y], {})
    assert not BINDINGS["add"].takes([x], [x.astype(np.float64), y], {})


def test_casts_round_to_the_nearest_even():
    x = np.concatenate(
        [
            normal(9001),
            np.array([0, -0.0, np.inf, -np.inf, 1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, 1e-40], np.float32),
        ]
    )
    bits = x.view(np.uint32)
    half = run("cast", [x.shape], [x], dtype=np.uint16)[0]
    np.testing.assert_array_equal(half, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
    np.testing.assert_array_equal(
        run("cast", [x.shape], [half])[0], (half.astype(np.uint32) << 16).view(np.float32)
    )
    nan = np.array([0x7F800001], np.uint32).view(np.float32)  # whose upper half alone would be an infinity
    assert np.isnan(run("cast", [(1,)], run("cast", [(1,)], [nan], dtype=np.uint16))[0])


@pytest.mark.parametrize("size", [1, 100, 8192, 100_003])
def test_sums(size):
    x = normal(size) + 1
    x64 = x.astype(np.float64)
    np.testing.assert_allclose(run("sum", [()], [x])[0], x64.sum(), rtol=1e-6)
    np.testing.assert_allclose(run("mean", [()], [x])[0], x64.mean(), rtol=1e-6)
    np.testing.assert_allclose(run("sum_sqr", [()], [x])[0], (x64**2).sum(), rtol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (3, 40, 33), (1000, 64), (70, 3000), (0, 5)])
def test_rows_summed_up(shape):
    """As a bias' gradient is."""
    x, last = normal(*shape), (*(1 for _ in shape[:-1]), shape[-1])
    close(
        run("repeat_back", [last], [x], shape=last)[0],
        x.astype(np.float64).reshape(-1, shape[-1]).sum(0).reshape(last),
        1e-6,
    )
    assert not BINDINGS["repeat_back"].takes(
        [np.empty((2, 3), np.float32)], [np.empty((4, 3), np.float32)], {}
    )


def test_results_past_the_caches():
    """Large results are written by other instructions, unless they lie on a source."""
    x, w = normal(5001, 1024), normal(1024)
    wanted = x * (1 / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)) * w
    room = np.empty(x.size + 16, np.float32)
    y = room[-room.ctypes.data % 64 // 4 :][: x.size].reshape(x.shape)
    run_once("rms_norm", [y], [x, w], {"eps": 1e-5}, 2)
    close(y, wanted)
    run_once("scale", [y], [x], {"by": 2.0}, 2)
    np.testing.assert_array_equal(y, 2 * x)
