"""L-BFGS on functions whose minimum is known, and its parts against their definitions."""

import copy
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llamatrain.errors import UsageError
from llamatrain.io.mapped_file import map_file
from llamatrain.optim.line_search import (
    CURVATURE,
    MAX_EVALUATIONS,
    PATIENCE,
    SEARCHES,
    SUFFICIENT,
    Condition,
    Line,
    Point,
    cubic_minimum,
    line_search,
)
from llamatrain.optim.methods import lbfgs
from llamatrain.optim.methods.lbfgs import LBFGS, LbfgsState
from llamatrain.platform.memory import resident_bytes
from tests.helpers.cli import TINY, ran, text_file

KINDS = list(SEARCHES)


def rosenbrock(x: np.ndarray) -> tuple[float, np.ndarray]:
    a, b = (float(value) for value in x)
    loss = (1 - a) ** 2 + 100 * (b - a * a) ** 2
    return loss, np.array([-2 * (1 - a) - 400 * a * (b - a * a), 200 * (b - a * a)])


def quadratic(n: int, condition: float) -> tuple[Callable, np.ndarray]:
    rng = np.random.default_rng(5)
    turn, _ = np.linalg.qr(rng.normal(size=(n, n)))
    matrix, best = turn * np.geomspace(1, condition, n) @ turn.T, rng.normal(size=n)
    return lambda x: (0.5 * (x - best) @ matrix @ (x - best), matrix @ (x - best)), best


def product(n: int) -> tuple[Callable, np.ndarray]:
    """Σ (c - a·b)² over a and b, all n by n, in float32."""
    rng = np.random.default_rng(7)
    c = rng.uniform(-1, 1, (n, n)).astype(np.float32)

    def evaluate(x: np.ndarray) -> tuple[float, np.ndarray]:
        a, b = x.reshape(2, n, n)
        error = a @ b - c
        return float(np.square(error, dtype=np.float64).sum()), 2 * np.concatenate(
            [(error @ b.T).ravel(), (a.T @ error).ravel()]
        )

    return evaluate, rng.uniform(-1, 1, 2 * n * n).astype(np.float32)


def minimise(
    evaluate: Callable, x: np.ndarray, steps: int, **options: object
) -> tuple[LbfgsState, str | None]:
    state = LbfgsState(x, LBFGS(**options))
    for _ in range(steps):
        if why := state.step(evaluate):
            return state, why
    return state, None


# ---- whole runs ------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_rosenbrock(kind: str) -> None:
    state, why = minimise(rosenbrock, np.array([-1.2, 1.0]), 60, line_search=kind, tolerance=1e-8)
    assert why and why.startswith("converged")
    np.testing.assert_allclose(state.x, [1.0, 1.0], atol=1e-7)
    assert state.evaluations < 80


@pytest.mark.parametrize("kind", KINDS)
def test_a_quadratic_in_50_dimensions_takes_few_iterations(kind: str) -> None:
    evaluate, best = quadratic(50, condition=30.0)
    state, why = minimise(evaluate, np.zeros(50), 60, line_search=kind, tolerance=1e-7)
    assert why and why.startswith("converged")
    assert state.iteration <= 55  # steepest descent takes hundreds
    np.testing.assert_allclose(state.x, best, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_product_of_matrices_in_float32(kind: str) -> None:
    evaluate, x = product(8)
    state, _ = minimise(evaluate, x, 100, line_search=kind)
    assert state.x.dtype == np.float32
    assert state.loss < 1e-6 < evaluate(x)[0]


def test_each_step_lowers_the_loss() -> None:
    evaluate, x = product(6)
    state = LbfgsState(x)
    losses = []
    while state.step(evaluate) is None:
        losses.append(state.loss)
        assert evaluate(state.x)[0] == state.loss
        np.testing.assert_array_equal(evaluate(state.x)[1], state.gradient)
    assert losses == sorted(losses, reverse=True)


# ---- the parts against their definitions -----------------------------------


def dense_direction(state: LbfgsState) -> np.ndarray:
    """The direction of BFGS with the whole matrix, updated by the pairs that the state holds."""
    order = [(state.next_slot - state.move_count + k) % len(state.ys) for k in range(state.move_count)]
    s, y = state.s[order], state.y[order]
    inverse = np.eye(state.x.size) * (s[-1] @ y[-1]) / (y[-1] @ y[-1])
    for move, change in zip(s, y, strict=True):
        left = np.eye(state.x.size) - np.outer(move, change) / (change @ move)
        inverse = left @ inverse @ left.T + np.outer(move, move) / (change @ move)
    return -inverse @ state.gradient


@pytest.mark.parametrize(
    "steps", [1, 3, 5, 11]
)  # fewer pairs than the ring holds, as many, and after it came round
def test_the_two_loops_are_bfgs(steps: int) -> None:
    evaluate, _ = quadratic(12, condition=100.0)
    state, why = minimise(evaluate, np.zeros(12), steps, history=5)
    assert why is None
    assert state.move_count == min(steps, 5)
    np.testing.assert_allclose(state.direction(), dense_direction(state), rtol=1e-9, atol=1e-12)


LINES = {  # loss and slope at a length; each goes down at 0
    "parabola": lambda t: ((t - 3.0) ** 2, 2 * (t - 3.0)),
    "far": lambda t: ((t / 1000 - 1.0) ** 2, (t / 1000 - 1.0) / 500),
    "near": lambda t: ((t * 1000 - 1.0) ** 2, 2000 * (t * 1000 - 1.0)),
    "waves": lambda t: (-t / 4 + math.sin(3 * t) ** 2 + 0.02 * t * t, -0.25 + 3 * math.sin(6 * t) + 0.04 * t),
    "kink": lambda t: (abs(t - 0.7) ** 1.5, 1.5 * math.copysign(abs(t - 0.7) ** 0.5, t - 0.7)),
    "cliff": lambda t: (-t, -1.0) if t < 0.3 else (math.inf, math.nan),
    "torn": lambda t: (-t, -1.0) if t < 0.3 else (-t, math.nan),
    "wall": lambda t: (
        (t * t - math.log(1 - t) - 2 * t, 2 * t + 1 / (1 - t) - 2) if t < 1 else (math.nan, math.nan)
    ),
}


@pytest.mark.parametrize("first", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_line_search_keeps_its_word(kind: str, name: str, first: float) -> None:
    tried = []

    def at(length: float) -> tuple[float, float]:
        tried.append(length)
        return LINES[name](length)

    start, slope = LINES[name](0.0)
    loss = line_search(Line(at, start, slope), SEARCHES[kind], first)
    assert loss is not None
    assert len(tried) <= MAX_EVALUATIONS
    assert math.isfinite(LINES[name](tried[-1])[1])
    assert loss == LINES[name](tried[-1])[0] <= start + SUFFICIENT * tried[-1] * slope
    if kind != "armijo" and name not in (
        "cliff",
        "torn",
    ):  # whose slope never comes up: falling enough must do
        assert LINES[name](tried[-1])[1] >= CURVATURE * slope
    if kind == "strong-wolfe" and name not in ("cliff", "torn"):
        assert abs(LINES[name](tried[-1])[1]) <= -CURVATURE * slope


# a line, the first length that is tried, and the lengths that the three searches take; a length of None: another than before
DIFFERING = {
    "the first step does for all": ("parabola", 1.0, (1.0, 1.0, 1.0)),
    "it falls enough, and still as steeply: armijo alone takes it": ("far", 1.0, (1.0, 128.0, 128.0)),
    "it falls enough, and goes up too steeply: all but strong-wolfe take it": ("wall", 0.5, (0.5, 0.5, None)),
    "it falls enough and steeply, the next one goes up steeply": ("waves", 1.0, (1.0, None, None)),
}


@pytest.mark.parametrize("why", DIFFERING)
def test_line_searches_differ_where_their_conditions_do(why: str) -> None:
    """Of a descent that goes well each first step meets all three conditions: then all give the same losses."""
    name, first, wanted = DIFFERING[why]
    taken = list[float]()
    for kind in KINDS:
        tried = list[float]()
        loss, slope = LINES[name](0.0)
        line_search(
            Line(lambda length, tried=tried: tried.append(length) or LINES[name](length), loss, slope),
            SEARCHES[kind],
            first,
        )
        taken.append(tried[-1])
    for length, expected, others in zip(taken, wanted, (taken[1:], taken[2:], taken[:2]), strict=True):
        assert length == expected if expected is not None else length not in others


def test_descents_differ_by_their_line_searches() -> None:
    """From a start where the first steps are too short for one, and later ones too long for another."""
    losses = dict[str, list[float]]()
    for kind in KINDS:
        state = LbfgsState(np.array([-3.0, -4.0]), LBFGS(line_search=kind))
        losses[kind] = [state.loss for _ in range(24) if state.step(rosenbrock) is None]
    assert len({*map(tuple, losses.values())}) == 3
    assert losses["armijo"][:5] == losses["wolfe"][:5] == losses["strong-wolfe"][:5]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_searches_as_it_was_asked_to(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = set[Condition]()

    def seen(line: Line, condition: Condition, *more: float) -> float | None:
        asked.add(condition)
        return line_search(line, condition, *more)

    monkeypatch.setattr(lbfgs, "line_search", seen)
    given = ("--optimizer", "lbfgs", "--line-search", kind, "--ctx", 16, "--batch", 2, "--iters", 3)
    ran("from-scratch", text_file(tmp_path), *TINY, *given, "--out", tmp_path / "run")
    assert asked == {SEARCHES[kind]}


def test_interpolation_is_exact_on_a_cubic() -> None:
    low, high = (Point(t, t**3 - 3 * t + 5, 3 * t * t - 3) for t in (0.25, 2.0))
    assert cubic_minimum(low, high) == pytest.approx(0.75)  # at t = 1


def test_a_line_that_only_goes_up_is_given_up() -> None:
    tried = []
    line = Line(lambda length: (tried.append(length) or length, -1.0), 0.0, -1.0)
    assert line_search(line, SEARCHES["wolfe"], 1.0) is None
    assert len(tried) == PATIENCE < MAX_EVALUATIONS


def test_a_step_that_is_lost_in_rounding_is_none() -> None:
    """It promises so little that the loss before it is what it promises."""
    assert line_search(Line(lambda length: (1.0, -1e-9), 1.0, -1e-9), SEARCHES["wolfe"], 1e-10) is None


# ---- what may go wrong -----------------------------------------------------


def test_a_direction_uphill_is_dropped() -> None:
    evaluate, _ = quadratic(10, condition=10.0)
    state, _ = minimise(evaluate, np.zeros(10), 3)
    state.ys *= -1  # no such curvature: every direction turns round
    before = state.loss
    assert state.step(evaluate) is None
    assert state.loss < before
    assert state.move_count == 1


def test_a_step_without_curvature_is_not_remembered() -> None:
    slope = np.array([1.0, -2.0])
    state = LbfgsState(np.zeros(2), LBFGS(line_search="armijo"))
    for _ in range(3):
        assert state.step(lambda x: (float(slope @ x), slope)) is None
    assert (state.move_count, state.iteration) == (0, 3)


def test_a_misleading_history_is_dropped_once_then_it_says_so() -> None:
    evaluate, _ = quadratic(10, condition=10.0)
    state, _ = minimise(evaluate, np.zeros(10), 3)
    x, loss, evaluations = state.x.copy(), state.loss, state.evaluations
    why = state.step(lambda x: (loss + 1.0, np.ones_like(x)))
    assert why and why.startswith(
        f"stuck: the loss of {loss:.6g} fell by no more than its rounding in 10 evaluations"
    )
    assert state.evaluations == evaluations + PATIENCE
    np.testing.assert_array_equal(state.x, x)
    assert (state.loss, state.move_count) == (loss, 0)


@pytest.mark.parametrize("grain", [0.0, 1e-7, 1e-3, 0.3], ids=str)
def test_ten_evaluations_without_progress_end_it(grain: float) -> None:
    """A loss in steps, as products of rounded numbers have it: where it lies still, no line search goes on for long."""
    evaluate, x = product(8)
    found = list[float]()

    def rounded(x: np.ndarray) -> tuple[float, np.ndarray]:
        loss, gradient = evaluate(x)
        found.append(round(loss / grain) * grain if grain else loss)
        return found[-1], gradient

    state, why = minimise(rounded, x, 2000)
    assert why and why.split(":")[0] in ("stuck", "converged")
    lowest, idle = math.inf, 0
    for loss in found:
        lowest, idle = (loss, 0) if loss < lowest else (lowest, idle + 1)
        assert idle <= PATIENCE
    assert state.loss == lowest


def test_other_rows_begin_anew() -> None:
    one, _ = quadratic(10, condition=10.0)
    other, best = quadratic(10, condition=20.0)
    state, _ = minimise(one, np.zeros(10), 4)
    evaluations = state.evaluations
    state.restart()
    assert (state.move_count, state.iteration) == (0, 0)
    again = LBFGS().create_minimizer(state.x)
    again.restore(state.state_values())
    assert again.evaluations == evaluations
    for _ in range(60):
        why, twin = state.step(other), again.step(other)
        assert why == twin
        np.testing.assert_array_equal(state.x, again.x)
        if why:
            break
    np.testing.assert_allclose(state.x, best, atol=1e-4)


def test_a_loss_that_is_not_finite_at_the_start() -> None:
    why = LbfgsState(np.zeros(3)).step(lambda x: (math.nan, np.zeros(3)))
    assert why and why.startswith("stuck: the loss is nan")


def test_a_loss_that_float32_cannot_hold_is_one() -> None:
    """As a checkpoint may have it."""
    state, _ = minimise(rosenbrock, np.array([-1.2, 1.0], np.float32), 1)
    state.loss = 1e300
    assert state.step(rosenbrock) is None and state.loss < 100


def test_options_are_checked() -> None:
    with pytest.raises(UsageError, match="armijo, wolfe, strong-wolfe"):
        LBFGS(line_search="golden")
    with pytest.raises(UsageError, match="must be 1 move or more"):
        LBFGS(history=0)


# ---- the checkpoint --------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [0, 1, 4, 9])
def test_resume_gives_the_same_bits(kind: str, cut: int) -> None:
    evaluate, x = product(6)
    whole, _ = minimise(evaluate, x, 14, line_search=kind, history=4)
    first, _ = minimise(evaluate, x, cut, line_search=kind, history=4)
    second = LBFGS(history=4, line_search=kind).create_minimizer(x)
    second.restore(copy.deepcopy(first.state_values()))
    for _ in range(14 - cut):
        assert second.step(evaluate) is None
    for name, kept in whole.state_values().items():
        np.testing.assert_array_equal(second.state_values()[name], kept, err_msg=name)


def test_another_history_length_is_refused() -> None:
    state, _ = minimise(rosenbrock, np.array([-1.2, 1.0]), 3, history=4)
    with pytest.raises(UsageError, match=r"a history of 4 moves .got 6"):
        LBFGS(history=6).create_minimizer(state.x).restore(state.state_values())


def test_what_was_kept_is_whole() -> None:
    state, _ = minimise(rosenbrock, np.array([-1.2, 1.0]), 3)
    kept = {
        name: value if isinstance(value, np.ndarray | float) else int(value)
        for name, value in state.state_values().items()
    }
    assert LBFGS.state_problem(kept) is None and LBFGS.required_shapes(kept, 2).keys() < kept.keys()
    for name in ("loss", "iteration", "evaluations"):
        assert f"optimizer.lbfgs.{name}" in str(LBFGS.state_problem({**kept, name: True}))
    assert "memory_s" in LBFGS.required_shapes({"current_parameters": state.x}, 2)
    assert LBFGS.required_shapes({}, 2) == {} and LBFGS().create_minimizer(state.x).state_values() == {}


def test_a_copy_from_a_file_leaves_none_of_its_pages(tmp_path: Path) -> None:
    """A run that went on held its history twice: as it was copied, and as pages of the checkpoint."""
    (path := tmp_path / "f").write_bytes(bytes(8_000_000))
    history = np.frombuffer(map_file(path), np.float32).reshape(4, -1)
    target = np.ones(history.shape, np.float32)
    before = resident_bytes()
    lbfgs._copy(target, history)
    assert not target.any() and resident_bytes() - before < 2e6
