"""Compiled kernels of convolutions and of the gated delta rule against their definitions in float64."""

import numpy as np
import pytest

from llamatrain.compiler.thread_pool import CallTable
from llamatrain.kernels.cpu.registry import BINDINGS
from llamatrain.kernels.reference import KERNELS

RANDOM = np.random.default_rng(0)
Arrays = list[np.ndarray]


def run(op: str, shapes: list[tuple[int, ...]], ins: Arrays, **attrs: int) -> Arrays:
    """Return the results of one thread, which must have the same bits from two."""
    results = []
    for threads in (1, 2):
        outs, binding = [np.full(shape, 7, np.float32) for shape in shapes], BINDINGS[op]
        assert binding.takes(outs, ins, attrs)
        memory = np.full(binding.scratch(outs, ins, attrs, threads) + 64, 0xFF, np.uint8)  # full of NaN
        CallTable(binding.bind(outs, ins, attrs, memory[-memory.ctypes.data % 64 :], threads), threads)()
        results.append(outs)
    assert [each.tobytes() for each in results[0]] == [each.tobytes() for each in results[1]]
    return results[0]


def define(op: str, ins: Arrays, **attrs: int) -> Arrays:
    """Return the results of the definition in float64."""
    wide = [each if each.dtype == np.int32 else each.astype(np.float64) for each in ins]
    found = KERNELS[op](*wide, **attrs)
    return list(found) if isinstance(found, tuple) else [found]


def check(op: str, ins: Arrays, within: float = 1e-5, **attrs: int) -> Arrays:
    """Compare an op with its definition; return the compiled results."""
    expected = define(op, ins, **attrs)
    found = run(op, [each.shape for each in expected], ins, **attrs)
    for mine, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=0, atol=within * max(1, np.abs(wanted).max(initial=0)))
    return found


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def starts_of(batch: int, length: int, *cuts: int) -> np.ndarray:
    """Return the first token of each token's sample; samples begin at 0 and, in the last row, at the cuts."""
    starts = np.zeros((batch, length), np.int32)
    for cut in cuts:
        starts[-1, cut:] = cut
    return starts


# ---- convolution --------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "length", "width", "taps", "cuts"),
    [
        (2, 9, 40, 4, ()),
        (2, 33, 7, 3, (5, 6, 20)),
        (1, 2, 3, 5, (1,)),
        (3, 70, 129, 4, (64,)),
        (1, 4, 16, 1, ()),
    ],
)
def test_convolution(batch: int, length: int, width: int, taps: int, cuts: tuple[int, ...]) -> None:
    x, dy, w, starts = (
        normal(batch, length, width),
        normal(batch, length, width),
        normal(width, taps),
        starts_of(batch, length, *cuts),
    )
    check("causal_conv", [x, w, starts])
    check("causal_conv_back", [dy, w, starts])
    check("causal_conv_weight_back", [dy, x, starts], taps=taps)


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize(("tokens", "width", "taps"), [(1, 40, 4), (2, 7, 4), (9, 130, 3), (3, 5, 1)])
def test_convolution_from_a_state(batch: int, tokens: int, width: int, taps: int) -> None:
    state, x, w = normal(batch, taps - 1, width), normal(batch, tokens, width), normal(width, taps)
    after, y = check("causal_conv_step", [state, x, w])
    rows = np.concatenate([state, x], axis=1)
    whole = define("causal_conv", [rows, w, starts_of(batch, taps - 1 + tokens)])[0]
    np.testing.assert_allclose(y, whole[:, taps - 1 :], rtol=0, atol=1e-5)
    assert np.array_equal(after, rows[:, tokens:])


# ---- gated delta rule ---------------------------------------------------------


def rule(
    batch: int, length: int, key_heads: int, heads: int, size: int, width: int, *cuts: int, decay: float = 0.5
) -> Arrays:
    """Return sources of the rule as models have them: keys of length 1, and beta between 0 and 1."""
    q, k = (normal(batch, length, key_heads, size) for _ in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    q /= np.linalg.norm(q, axis=-1, keepdims=True) * np.float32(size**0.5)
    g = -np.float32(decay) * np.abs(normal(batch, length, heads))
    beta = 1 / (1 + np.exp(-normal(batch, length, heads)))
    return [q, k, normal(batch, length, heads, width), g, beta, starts_of(batch, length, *cuts)]


CASES = [
    (1, 1, 1, 1, 1, 1),
    (2, 5, 2, 2, 3, 4),
    (1, 70, 2, 4, 16, 24),
    (2, 130, 1, 3, 33, 17, 64, 65, 100),
    (1, 200, 2, 2, 64, 48, 7, 128),
    (1, 65, 1, 2, 128, 128),
]


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("chunk", [16, 64, 128])
@pytest.mark.parametrize("case", CASES)
def test_delta_rule(case: tuple[int, ...], chunk: int, correct: bool) -> None:
    ins, how = rule(*case), {"chunk": chunk, "correct": correct}
    _, states = check("gated_delta_rule", ins, **how)
    check("gated_delta_rule_back", [normal(*ins[2].shape), *ins, states], within=3e-5, **how)


@pytest.mark.parametrize("decay", [0.0, 1e-3, 5.0, 60.0])
def test_any_decay(decay: float) -> None:
    """Neither nothing forgotten nor nearly everything is a problem."""
    ins = rule(1, 150, 1, 2, 32, 32, 40, decay=decay)
    _, states = check("gated_delta_rule", ins, within=2e-5, chunk=64)
    check("gated_delta_rule_back", [normal(*ins[2].shape), *ins, states], within=5e-5, chunk=64)


def test_default_chunk() -> None:
    """A graph that names no chunk has chunks of 64 tokens."""
    ins = rule(1, 70, 2, 4, 16, 24)
    _, states = check("gated_delta_rule", ins)
    assert states.shape[1] == 2
    check("gated_delta_rule_back", [normal(*ins[2].shape), *ins, states], within=3e-5)


def test_chunks_agree() -> None:
    """Results do not depend on the length of chunks, except for rounding."""
    ins = rule(2, 300, 2, 4, 64, 64, 100, 111)
    dout, found = normal(*ins[2].shape), []
    for chunk in (16, 32, 48, 64, 96, 128):
        out, states = run(
            "gated_delta_rule",
            [each.shape for each in define("gated_delta_rule", ins, chunk=chunk)],
            ins,
            chunk=chunk,
        )
        grads = run(
            "gated_delta_rule_back", [each.shape for each in ins[:5]], [dout, *ins, states], chunk=chunk
        )
        found.append([out, *grads])
    for others in found[1:]:
        for mine, first in zip(others, found[0], strict=True):
            np.testing.assert_allclose(mine, first, rtol=0, atol=1e-5 * max(1, np.abs(first).max()))


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("case", CASES[:5])
def test_step_by_step_from_a_state(case: tuple[int, ...], correct: bool) -> None:
    *ins, _ = rule(*case[:6])
    state = normal(case[0], case[3], case[4], case[5])
    check("gated_delta_step", [state, *ins], correct=correct)


def test_nan_shows() -> None:
    ins = rule(1, 100, 1, 1, 16, 16)
    ins[2][0, 10] = np.nan
    shapes = [each.shape for each in define("gated_delta_rule", ins, chunk=64)]
    out, _ = run("gated_delta_rule", shapes, ins, chunk=64)
    assert np.isnan(out[0, 10:]).all()
