"""Torch kernels of convolutions and of the gated delta rule against the reference kernels."""

import numpy as np
import pytest

from llamatrain.kernels.reference import KERNELS as REFERENCE

torch = pytest.importorskip("torch")
recurrent = pytest.importorskip("llamatrain.kernels.torch.recurrent")
KERNELS = pytest.importorskip("llamatrain.kernels.torch.registry").KERNELS

RANDOM = np.random.default_rng(0)
Arrays = list[np.ndarray]
BOUNDS = {np.float64: 1e-10, np.float32: 4e-5}  # of the largest number of a result


def run(op: str, ins: Arrays, expected: Arrays, attrs: dict) -> Arrays:
    """Return the results of a torch kernel; memory that it writes to is full of NaN before."""
    kernel, sources = KERNELS[op], [torch.from_numpy(each) for each in ins]
    before = [each.copy() for each in ins]
    if kernel.writes:
        out = tuple(torch.full(each.shape, torch.nan, dtype=sources[0].dtype) for each in expected)
        kernel.run(*sources, **attrs, out=out)
    else:
        found = kernel.run(*sources, **attrs)
        out = found if isinstance(found, tuple) else (found,)
    assert all(np.array_equal(mine, wanted) for mine, wanted in zip(ins, before, strict=True))
    return [each.numpy() for each in out]


def check(op: str, ins: Arrays, **attrs) -> None:
    """Compare a torch kernel in both types with the reference kernel in float64."""
    found = REFERENCE[op](*ins, **attrs)
    expected = list(found) if isinstance(found, tuple) else [found]
    for dtype, within in BOUNDS.items():
        cast = [each if each.dtype == np.int32 else each.astype(dtype) for each in ins]
        for mine, wanted in zip(run(op, cast, expected, attrs), expected, strict=True):
            assert mine.dtype == dtype
            atol = within * max(1, np.abs(wanted).max(initial=0))
            np.testing.assert_allclose(mine, wanted, rtol=0, atol=atol)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape)


def starts_of(batch: int, length: int, *cuts: int) -> np.ndarray:
    """Return the first token of each token's sample; samples begin at 0 and, in the last row, at the cuts."""
    starts = np.zeros((batch, length), np.int32)
    for cut in cuts:
        starts[-1, cut:] = cut
    return starts


@pytest.fixture(params=[1 << 16, 1])
def group(request, monkeypatch):
    """Compute many chunks at once, or each chunk for itself."""
    monkeypatch.setattr(recurrent, "GROUP", request.param)


# ---- convolution --------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "length", "width", "taps", "cuts"),
    [(2, 7, 3, 4, ()), (2, 9, 5, 3, (2, 5, 6)), (1, 2, 4, 5, (1,)), (1, 1, 1, 1, ()), (3, 20, 2, 4, (19,))],
)
def test_convolutions(batch, length, width, taps, cuts):
    x, dy, w = normal(batch, length, width), normal(batch, length, width), normal(width, taps)
    starts = starts_of(batch, length, *cuts)
    starts[0, -1] += length * (batch > 1)  # a token that does not even see itself
    check("causal_conv", [x, w, starts])
    check("causal_conv_back", [dy, w, starts])
    check("causal_conv_weight_back", [dy, x, starts], taps=taps)


def test_a_convolution_sees_nothing_of_the_sample_before():
    x, w, starts = normal(1, 6, 2), normal(2, 4), starts_of(1, 6, 3)
    x[:, :3] = np.inf
    y = run("causal_conv", [x, w, starts], [x], {})[0]
    assert np.isfinite(y[:, 3:]).all()


@pytest.mark.parametrize("length", [1, 2, 9])
@pytest.mark.parametrize("taps", [1, 2, 4])
def test_convolution_steps(length, taps):
    check("causal_conv_step", [normal(2, taps - 1, 5), normal(2, length, 5), normal(5, taps)], into=True)


# ---- gated delta rule -----------------------------------------------------------


def delta_sources(
    batch: int, length: int, key_heads: int, heads: int, size: int, width: int, decay: float = 0.3
) -> Arrays:
    """Return q, k, v, g and beta; keys have a length of 1, and g is about -decay."""
    q, k = normal(batch, length, key_heads, size), normal(batch, length, key_heads, size)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    g = -decay * np.abs(normal(batch, length, heads))
    beta = 1 / (1 + np.exp(-normal(batch, length, heads)))
    return [q, k, normal(batch, length, heads, width), g, beta]


def check_delta(sources: Arrays, starts: np.ndarray, correct: bool = True, chunk: int = 16) -> None:
    """Compare both directions."""
    attrs = {"chunk": chunk, "correct": correct}
    check("gated_delta_rule", [*sources, starts], **attrs)
    _, states = REFERENCE["gated_delta_rule"](*sources, starts, **attrs)
    check("gated_delta_rule_back", [normal(*sources[2].shape), *sources, starts, states], **attrs)


SIZES = [(1, 1, 1, 4, 3), (2, 2, 4, 5, 7), (2, 1, 3, 8, 4), (1, 3, 3, 1, 1)]


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 35])
@pytest.mark.parametrize(("batch", "key_heads", "heads", "size", "width"), SIZES)
def test_delta_rule(batch, key_heads, heads, size, width, length, correct):
    sources = delta_sources(batch, length, key_heads, heads, size, width)
    check_delta(sources, starts_of(batch, length), correct)


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("cuts", [(1,), (15, 16), (16, 32), (3, 17, 18, 34), range(37)])
def test_delta_rule_of_several_samples(cuts, correct, group):
    check_delta(delta_sources(2, 37, 2, 4, 3, 5), starts_of(2, 37, *cuts), correct)


@pytest.mark.parametrize("correct", [True, False])
def test_starts_that_begin_nothing_or_lie_ahead(correct):
    starts = starts_of(2, 21)
    starts[0], starts[1, 7:10] = -1, 20  # one sample from before the row; tokens that see only themselves
    check_delta(delta_sources(2, 21, 1, 2, 3, 4), starts, correct)


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("chunk", [16, 48, 64, 256])
def test_chunks_of_all_sizes(chunk, correct):
    check_delta(delta_sources(1, 131, 1, 2, 8, 4, decay=0.02), starts_of(1, 131, 70), correct, chunk)


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("decay", [0.0, 1e-6, 30.0, 1e4])
def test_decays_from_none_to_all(decay, correct):
    check_delta(delta_sources(1, 70, 2, 2, 8, 4, decay), starts_of(1, 70, 40), correct, 64)


@pytest.mark.parametrize("correct", [True, False])
def test_a_huge_decay_does_not_blur_the_small_ones_behind_it(correct):
    sources = delta_sources(1, 64, 1, 2, 4, 4, decay=0.1)
    sources[3][:, 9] = -3e6
    check_delta(sources, starts_of(1, 64), correct, 64)


def test_equal_keys_lose_no_digits():
    sources = delta_sources(1, 128, 1, 1, 8, 8, decay=1e-3)
    sources[1][:] = sources[1][:, :1]
    sources[4][:] = 0.999
    check_delta(sources, starts_of(1, 128), True, 64)


def test_gradients_are_the_slopes_of_the_outputs():
    sources, starts, step = delta_sources(1, 19, 1, 2, 3, 2), starts_of(1, 19, 5), 1e-6
    attrs = {"chunk": 16, "correct": True}
    shapes = [np.empty((1, 19, 2, 2)), np.empty((1, 2, 2, 3, 2))]
    dout, ways = normal(1, 19, 2, 2), [normal(*each.shape) for each in sources]
    _, states = run("gated_delta_rule", [*sources, starts], shapes, attrs)
    gradients = run("gated_delta_rule_back", [dout, *sources, starts, states], sources, attrs)
    ends = [
        run("gated_delta_rule", [x + by * way for x, way in zip(sources, ways, strict=True)] + [starts], shapes, attrs)[0]
        for by in (step, -step)
    ]  # fmt: skip
    slope = ((ends[0] - ends[1]) * dout).sum() / (2 * step)
    assert slope == pytest.approx(
        sum((d * way).sum() for d, way in zip(gradients, ways, strict=True)), rel=1e-6
    )


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("length", [1, 3, 8, 9, 65])
@pytest.mark.parametrize(("batch", "key_heads", "heads", "size", "width"), SIZES)
def test_delta_steps(batch, key_heads, heads, size, width, length, correct):
    sources = delta_sources(batch, length, key_heads, heads, size, width)
    check("gated_delta_step", [normal(batch, heads, size, width), *sources], correct=correct, into=True)


@pytest.mark.parametrize("correct", [True, False])
def test_a_graph_of_calls_can_be_captured(correct):
    """No number is read: the meta device has none."""
    q, v, g = (torch.empty(2, 40, *shape, device="meta") for shape in ((1, 4), (2, 3), (2,)))
    sources, starts = (q, q, v, g, g), torch.empty(2, 40, dtype=torch.int32, device="meta")
    states, attrs = torch.empty(2, 3, 2, 4, 3, device="meta"), {"chunk": 16, "correct": correct}
    recurrent.gated_delta_rule(*sources, starts, **attrs, out=(torch.empty_like(v), torch.empty_like(states)))
    out = tuple(torch.empty_like(each) for each in sources)
    recurrent.gated_delta_rule_back(v, *sources, starts, states, **attrs, out=out)
    for tokens in (40, 2):
        parts = (each[:, :tokens] for each in sources)
        recurrent.gated_delta_step(states[:, 0], *parts, correct=correct)
