"""Torch kernels of the optimizer against the reference kernels."""

import numpy as np
import pytest

from llamatrain.kernels.reference import KERNELS as REFERENCE

torch = pytest.importorskip("torch")
optimizer = pytest.importorskip("llamatrain.kernels.torch.optimizer")
KERNELS = pytest.importorskip("llamatrain.kernels.torch.registry").KERNELS

RANDOM = np.random.default_rng(0)
Arrays = list[np.ndarray]
BOUNDS = {np.float64: 1e-10, np.float32: 1e-6}  # of the largest number of a result
ADAMW = {"beta1": 0.9, "beta2": 0.98, "eps": 1e-8}
IN_PLACE = {
    "opt_step_adamw": 3,
    "opt_step_sgd": 2,
    "opt_momentum": 1,
    "opt_step": 1,
    "opt_unit": 1,
    "opt_adapt": 2,
}


def run(op: str, ins: Arrays, expected: Arrays, attrs: dict, place: int | None = None) -> Arrays:
    """Return the results of a torch kernel, which have the memory of the first sources, or of one."""
    kernel, sources = KERNELS[op], [torch.from_numpy(each.copy()) for each in ins]
    out = tuple(torch.full(each.shape, torch.nan, dtype=sources[0].dtype) for each in expected)
    shared = IN_PLACE.get(op, 0)
    out = (*sources[:shared], *out[shared:]) if place is None else (sources[place],)
    if kernel.writes:
        kernel.run(*sources, **attrs, out=out)
    else:
        found = kernel.run(*sources, **attrs)
        out = found if isinstance(found, tuple) else (found,)
    for number, (source, before) in enumerate(zip(sources, ins, strict=True)):
        if number >= shared and number != place:
            np.testing.assert_array_equal(source.numpy(), before)
    return [each.numpy() for each in out]


def define(op: str, ins: Arrays, attrs: dict) -> Arrays:
    """Return the results of the reference kernel."""
    found = REFERENCE[op](*ins, **attrs)
    return [np.asarray(each) for each in (found if isinstance(found, tuple) else (found,))]


def check(op: str, ins: Arrays, place: int | None = None, **attrs) -> None:
    """Compare a torch kernel in both types with the reference kernel in float64."""
    expected = define(op, ins, attrs)
    for dtype, within in BOUNDS.items():
        cast = [each if each.dtype == np.int32 else each.astype(dtype) for each in ins]
        for mine, wanted in zip(run(op, cast, expected, attrs, place), expected, strict=True):
            assert mine.dtype == (np.int32 if wanted.dtype == np.int32 else dtype)
            atol = within * max(1, np.abs(wanted).max(initial=0))
            np.testing.assert_allclose(mine, wanted, rtol=0, atol=atol)


def normal(*shape: int) -> np.ndarray:
    return np.asarray(RANDOM.standard_normal(shape))


def row_gradient(rows: int, width: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the gradient of a few rows, their places, and the whole gradient."""
    ids, dy = RANDOM.integers(0, rows, (2, count)).astype(np.int32), normal(2, count, width)
    found, places = define("opt_rows", [dy, ids], {"rows": rows})
    return found, places, define("get_rows_back", [dy, ids], {"rows": rows})[0]


@pytest.fixture(params=[1 << 24, 7])
def piece(request, monkeypatch):
    """Update a weight at once, or in small pieces."""
    monkeypatch.setattr(optimizer, "PIECE", request.param)


SCHEDULE = np.array([0.02, 0.271, 0.0394])
WEIGHTS = [(5, 3), (1,), (2, 3, 4), (64, 33), (0, 4)]


@pytest.mark.parametrize(("rows", "count"), [(5, 3), (7, 20), (3000, 4), (1, 1), (4, 0)])
def test_rows_of_a_gradient(rows, count):
    ids = RANDOM.integers(0, rows, (2, count)).astype(np.int32)
    check("opt_rows", [normal(2, count, 6), ids], rows=rows)


def test_rows_of_a_gradient_are_in_any_order_of_ids():
    check("opt_rows", [normal(6, 2), np.array([4, 0, 4, 2, 0, 4], np.int32)], rows=6)


def test_the_sum_of_squares_of_rows():
    for rows, count in ((5, 3), (7, 20), (300, 4)):
        found, places, whole = row_gradient(rows, 6, count)
        check("opt_sum_sqr", [found, places])
        assert define("opt_sum_sqr", [found, places], {})[0] == pytest.approx(np.square(whole).sum())


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("shape", WEIGHTS)
def test_updates(shape, decay, piece):
    w, m, g, factor = normal(*shape), normal(*shape), normal(*shape), np.asarray(0.6)
    check("opt_step_adamw", [w, m, normal(*shape) ** 2, g, SCHEDULE, factor], **ADAMW, decay=decay)
    check("opt_step_sgd", [w, m, g, SCHEDULE, factor], momentum=0.9, decay=decay)
    check("opt_step_sgd", [w, m, g, SCHEDULE, factor], momentum=0.0, decay=decay)
    check("opt_step", [w, g, SCHEDULE], by=0.2, decay=decay)


@pytest.mark.parametrize(("rows", "width", "count"), [(5, 3, 3), (9, 20, 2), (40, 1, 30)])
def test_updates_by_rows(rows, width, count, piece):
    g, places, _ = row_gradient(rows, width, count)
    w, m, v = normal(rows, width), normal(rows, width), normal(rows, width) ** 2
    check("opt_step_adamw", [w, m, v, g, SCHEDULE, np.asarray(0.6), places], **ADAMW, decay=0.1)
    check("opt_step_sgd", [w, m, g, SCHEDULE, np.asarray(0.6), places], momentum=0.9, decay=0.1)


def test_updates_by_rows_and_by_the_whole_gradient_have_the_same_bits(piece):
    g, places, whole = (
        each.astype(np.float32) if each.dtype == np.float64 else each for each in row_gradient(9, 20, 7)
    )
    w, m, v = (normal(9, 20).astype(np.float32) for _ in range(3))
    rest = [SCHEDULE.astype(np.float32), np.asarray(0.6, np.float32)]
    attrs = {**ADAMW, "decay": 0.1}
    by_rows = run("opt_step_adamw", [w, m, v * v, g, *rest, places], [w, m, v], attrs)
    at_once = run("opt_step_adamw", [w, m, v * v, whole, *rest], [w, m, v], attrs)
    assert [each.tobytes() for each in by_rows] == [each.tobytes() for each in at_once]


def test_adamw_is_that_of_torch():
    attrs, rate, decay = {**ADAMW, "decay": 0.1}, 0.02, 0.1
    mine = [normal(4, 5), np.zeros((4, 5)), np.zeros((4, 5))]
    weight = torch.nn.Parameter(torch.from_numpy(mine[0].copy()))
    peer = torch.optim.AdamW([weight], rate, (0.9, 0.98), 1e-8, decay)
    for step in range(1, 4):
        weight.grad = torch.from_numpy(normal(4, 5))
        schedule = np.array([rate, 1 - 0.9**step, 1 - 0.98**step])
        mine = run("opt_step_adamw", [*mine, weight.grad.numpy(), schedule, np.asarray(1.0)], mine, attrs)
        peer.step()
    np.testing.assert_allclose(mine[0], weight.detach().numpy(), rtol=1e-12)


def test_a_rate_of_zero_changes_no_weight():
    w, g, schedule = normal(3, 4), normal(3, 4), np.array([0, 0.1, 0.02])
    state = [np.zeros((3, 4)), np.zeros((3, 4))]
    found = run(
        "opt_step_adamw", [w, *state, g, schedule, np.asarray(1.0)], [w, *state], {**ADAMW, "decay": 0.1}
    )
    np.testing.assert_array_equal(found[0], w)


@pytest.mark.parametrize("shape", [(5, 3), (1,), (2, 3, 4)])
def test_parts_of_steps(shape):
    m, g, factor = normal(*shape), normal(*shape), np.asarray(0.6)
    check("opt_momentum", [m, g, factor], momentum=0.95)
    check("opt_ahead", [m, g, factor], momentum=0.95)
    check("opt_unit", [m, np.asarray(np.square(m).sum())], eps=1e-7)
    check("opt_unit", [0 * m, np.asarray(0.0)], eps=1e-7)
    check("opt_adapt", [np.square(g), m], beta=0.95, eps=1e-6)
    for place in (None, 0, 1):
        check("opt_blend", [m, g], place, a=3.4, b=-4.7)


@pytest.mark.parametrize("limit", [0.0, 1.0, 1e3])
@pytest.mark.parametrize("squares", [(4.0,), (0.0, 0.0), (1.5, 2e6, 3e-9), (2.0, np.inf), (np.nan, 1.0)])
def test_clip_factors(squares, limit):
    check("clip_factor", [np.asarray(each) for each in squares], limit=limit)


def test_clip_factors_of_sums_that_float32_cannot_hold():
    ins = [np.asarray(3e38, np.float32)] * 3
    found = run("clip_factor", ins, ins[:2], {"limit": 1.0})
    np.testing.assert_allclose(found, define("clip_factor", ins, {"limit": 1.0}), rtol=1e-6)


def test_a_graph_of_calls_can_be_captured():
    """No number is read: the meta device has none."""
    w, schedule, factor = (torch.empty(shape, device="meta") for shape in ((5, 3), (3,), ()))
    ids, adamw = torch.empty(5, dtype=torch.int32, device="meta"), {**ADAMW, "decay": 0.1}
    optimizer.opt_rows(w, ids, rows=5)
    optimizer.opt_sum_sqr(w, ids)
    for places in (None, ids):
        optimizer.opt_step_adamw(w, w, w, w, schedule, factor, places, **adamw, out=(w, w, w))
        optimizer.opt_step_sgd(w, w, w, schedule, factor, places, momentum=0.9, decay=0.1, out=(w, w))
    optimizer.opt_ahead(w, w, factor, momentum=0.9, out=(w,))
    optimizer.opt_unit(w, factor, eps=1e-7, out=(w,))
    optimizer.opt_adapt(w, w, beta=0.95, eps=1e-6, out=(w, w))
    optimizer.opt_step(w, w, schedule, by=0.2, decay=0.1, out=(w,))
    optimizer.clip_factor(factor, factor, limit=1.0)
