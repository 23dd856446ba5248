"""Whole programs: what goes in and out, and state that lasts."""

from typing import Any

import numpy as np
import pytest

from llamatrain.engine.device import create_device
from llamatrain.engine.plan import plan
from llamatrain.engine.program import Program
from llamatrain.errors import GraphError
from llamatrain.graph import ops as O
from llamatrain.graph.autodiff import value_and_gradients
from llamatrain.graph.ops import flash_attn, silu, soft_max
from llamatrain.graph.printing import describe
from llamatrain.graph.tensor import BF16, F32, F64, I32, Tensor, parameter, placeholder, state
from llamatrain.platform.memory import allocate
from tests.helpers.opaque_device import OpaqueDevice

Arrays = dict[Tensor, np.ndarray]


def reference(outputs: list[Tensor], arrays: Arrays | None = None) -> Program:
    return Program.build(outputs, arrays or {}, kernels="reference")


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# ---- in and out ------------------------------------------------------------


def test_a_program_does_what_numpy_does() -> None:
    x, w, b = placeholder("x", (5, 4)), parameter("w", (3, 4)), parameter("b", (3,))
    y = O.add(O.matmul(x, w), b)
    loss = O.mean(O.sqr(O.view(O.transpose(y), slices=((0, 2, 1), (0, 5, 2)))))
    arrays = {x: random(5, 4), w: random(3, 4, seed=1), b: random(3, seed=2)}
    program = reference([y, loss, O.transpose(y)], arrays)
    program()
    expected = arrays[x] @ arrays[w].T + arrays[b]
    np.testing.assert_allclose(program.read(y), expected, rtol=1e-6)
    np.testing.assert_allclose(program.read(loss), np.mean(expected.T[0:2, 0:5:2] ** 2), rtol=1e-6)
    assert np.shares_memory(program.read(x), arrays[x])
    first = [program.read(out).copy() for out in program.plan.outputs]
    np.testing.assert_array_equal(first[2], first[0].T)
    program()
    for out, before in zip(program.plan.outputs, first, strict=True):
        np.testing.assert_array_equal(program.read(out), before)


def test_inputs_changed_between_runs_matter() -> None:
    x = placeholder("x", (3,))
    program = reference([O.scale(x, by=2.0)])
    for value in (1.0, -4.0):
        program.write(x, value)
        program()
        (out,) = program.plan.outputs
        np.testing.assert_array_equal(program.read(out), [2 * value] * 3)


def test_pinned_outputs_lie_in_the_callers_memory() -> None:
    x = placeholder("x", (3, 2))
    h = O.sqr(x)
    outputs = [
        h,
        O.transpose(h),
        O.reshape(h, shape=(6,)),
        O.scale(h, by=0.5),
    ]  # views too, and one that is read on
    arrays = {output: np.full(output.shape, np.nan, np.float32) for output in outputs}
    program = reference(outputs, {x: random(3, 2), **arrays})
    for seed in (1, 2):
        program.write(x, random(3, 2, seed=seed))
        program()
        squares = random(3, 2, seed=seed) ** 2
        for output, expected in zip(
            outputs, (squares, squares.T, squares.reshape(6), squares / 2), strict=True
        ):
            assert np.shares_memory(program.read(output), arrays[output])
            np.testing.assert_array_equal(arrays[output], expected)


@pytest.mark.parametrize(
    "bad", [np.zeros((3, 2), np.float64), np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32).T]
)
def test_an_array_that_does_not_fit_is_refused(bad: np.ndarray) -> None:
    x = placeholder("tokens", (3, 2))
    with pytest.raises(GraphError, match=r"tokens f32\[3, 2\].*float(32|64)\[[23], [23]\]"):
        reference([O.sqr(x)], {x: bad})


def test_leaves_and_repeated_outputs_may_be_asked_for() -> None:
    x = placeholder("x", (2,))
    y = O.sqr(x)
    program = reference([x, y, y], {x: np.array([2, 3], np.float32)})
    program()
    np.testing.assert_array_equal(program.read(x), [2, 3])
    np.testing.assert_array_equal(program.read(y), [4, 9])


def test_two_outputs_of_one_node() -> None:
    q, starts = placeholder("q", (1, 2, 1, 2)), placeholder("starts", (1, 2), I32)
    out, lse = flash_attn(q, q, q, starts, scale=1.0)
    program = reference([lse, out], {q: random(1, 2, 1, 2)})
    program()
    np.testing.assert_allclose(program.read(lse)[0, 0, 0], np.sum(program.read(q)[0, 0, 0] ** 2), rtol=1e-6)
    np.testing.assert_array_equal(program.read(out)[0, 0], program.read(q)[0, 0])


def test_what_is_computed_is_not_written_and_what_is_read_is_no_way_in() -> None:
    x = placeholder("x", (3,))
    y = O.sqr(x)
    program = reference([y])
    with pytest.raises(GraphError, match="cannot write"):
        program.write(y, 1.0)
    with pytest.raises(ValueError, match="read-only"):
        program.read(x)[0] = 1.0


def test_a_device_says_which_nodes_have_a_kernel_of_their_own() -> None:
    x = placeholder("x", (2, 3))
    made, widened = O.sqr(x), O.log(x)  # log has none
    for kernels, expected in (("cpu", [True, False]), ("reference", [True, True])):
        assert [create_device(kernels).has_kernel(each.node) for each in (made, widened)] == expected


def test_a_device_may_have_memory_that_nobody_sees() -> None:
    """Gradients in an arena, and a step on the weights by a program that reads them there: to the bit as it is done here."""
    x, w = placeholder("x", (6, 4)), parameter("w", (3, 4))
    loss, (grad,) = value_and_gradients(O.sum_sqr(silu(O.matmul(x, w))), [w])
    left, moments = state("w.grad", w.shape), [state(f"w.{name}", w.shape) for name in "mv"]
    schedule, one = placeholder("schedule", (3,)), O.fill(shape=(), value=1.0)
    stepped = list(
        O.opt_step_adamw(w, *moments, left, schedule, one, beta1=0.9, beta2=0.999, eps=1e-8, decay=0.1)
    )
    found, away = [], OpaqueDevice()
    for device in (create_device("reference"), away):
        arrays: dict[Tensor, Any] = {
            w: random(3, 4, seed=1),
            **{each: np.zeros(w.shape, np.float32) for each in moments},
        }
        there = {tensor: device.use_memory(tensor, array, True) for tensor, array in arrays.items()}
        back = Program(plan([loss, grad]), {w: there[w]}, device)
        update = Program(plan(stepped), there | {left: back.get_view(grad)}, device)
        update.write(schedule, [0.1, 0.1, 0.001])
        for seed in (2, 3):
            back.write(x, random(6, 4, seed=seed))
            back()
            update()
            found.append([back.read(loss).copy(), *(update.read(each).copy() for each in stepped)])
        update.write(moments[0], np.nan)
        assert update.find_not_finite() is moments[0]
    assert away.launches == 4
    for here, elsewhere in zip(found[:2], found[2:], strict=True):
        for expected, other in zip(here, elsewhere, strict=True):
            np.testing.assert_array_equal(other, expected)


# ---- state -----------------------------------------------------------------


def test_a_cache_fills_up_over_runs() -> None:
    """Keys and values of one token a run, written into their rows: the same attention as over all at once."""
    length, heads, size = 5, 2, 4
    q, k, v = (random(1, length, heads, size, seed=seed) for seed in (1, 2, 3))
    row, last = placeholder("row", (1,), I32), placeholder("last", (1, 1), I32)
    starts = placeholder("starts", (1, 1), I32)
    new = [placeholder(name, (1, heads, size)) for name in "qkv"]
    caches = [state(f"cache.{name}", (length, heads, size)) for name in "kv"]
    grown = [O.set_rows(cache, each, row, into=True) for cache, each in zip(caches, new[1:], strict=True)]
    seen = [O.reshape(each, shape=(1, length, heads, size)) for each in grown]
    out, _ = flash_attn(O.reshape(new[0], shape=(1, 1, heads, size)), *seen, starts, last, scale=0.5)
    program = reference([out])
    steps = []
    for step in range(length):
        program.write(row, step)
        program.write(last, step)
        for leaf, whole in zip(new, (q, k, v), strict=True):
            program.write(leaf, whole[:, step])
        program()
        steps.append(program.read(out)[:, 0].copy())
    whole, at = (
        [placeholder(name, (1, length, heads, size)) for name in "qkv"],
        placeholder("starts", (1, length), I32),
    )
    expected, _ = flash_attn(*whole, at, scale=0.5)
    once = reference([expected], dict(zip(whole, (q, k, v), strict=True)))
    once()
    np.testing.assert_allclose(np.stack(steps, axis=1), once.read(expected), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(program.read(caches[0]), k[0])


def test_a_gradient_goes_through_rows_written_into_a_state() -> None:
    cache, rows, ids = (
        state("cache", (4, 3), F64),
        parameter("rows", (2, 3), F64),
        placeholder("ids", (2,), I32),
    )
    weights = placeholder("weights", (4, 3), F64)
    loss = O.sum(O.mul(O.sqr(O.set_rows(cache, rows, ids, into=True)), weights))
    value, grads = value_and_gradients(loss, [rows])
    arrays = {cache: np.ones((4, 3)), rows: np.arange(6.0).reshape(2, 3), ids: np.array([2, 0], np.int32)}
    arrays[weights] = np.arange(12.0).reshape(4, 3)
    program = reference([value, *grads], arrays)
    program()
    np.testing.assert_array_equal(program.read(grads[0]), 2 * arrays[rows] * arrays[weights][[2, 0]])
    np.testing.assert_array_equal(arrays[cache], [[3, 4, 5], [1, 1, 1], [0, 1, 2], [1, 1, 1]])


def test_whoever_reads_a_state_before_its_change_reads_it_as_it_was() -> None:
    counter, one = state("counter", ()), O.fill(shape=(), value=1.0)
    after = O.acc(counter, one, slices=(), into=True)
    before, doubled = O.scale(counter, by=1.0), O.scale(after, by=2.0)
    for outputs in ([after, before, doubled], [doubled, before, after]):
        program = reference(outputs)
        for run in range(3):
            program()
            assert (program.read(before), program.read(after), program.read(doubled)) == (
                run,
                run + 1,
                2 * run + 2,
            )


def test_whoever_reads_the_whole_before_a_part_is_changed_reads_it_as_it_was() -> None:
    memory, y = state("memory", (4,)), placeholder("y", (2,))
    changed = O.set(memory, y, slices=((0, 2, 1),), into=True)
    whole, other = O.scale(memory, by=1.0), O.scale(O.view(memory, slices=((1, 3, 1),)), by=1.0)
    for outputs in ([changed, whole, other], [whole, other, changed]):
        arrays = {memory: np.arange(4, dtype=np.float32), y: np.full(2, 9, np.float32)}
        program = reference(outputs, arrays)
        program()
        np.testing.assert_array_equal(arrays[memory], [9, 9, 2, 3])
        np.testing.assert_array_equal(program.read(whole), [0, 1, 2, 3])
        np.testing.assert_array_equal(program.read(other), [1, 2])


@pytest.mark.parametrize("step", [1, 2])
def test_a_change_of_a_part_through_a_view_is_refused(step: int) -> None:
    """`set` and `acc` change parts; a view of a part given to them could not be waited for by readers of the rest."""
    memory, y = state("memory", (4,)), placeholder("y", (2,))
    changed = O.cpy(O.view(memory, slices=((0, 2 * step, step),)), y, into=True)
    with pytest.raises(GraphError, match="in place"):
        reference([changed], {memory: np.zeros(4, np.float32), y: np.ones(2, np.float32)})


# ---- memory shared by programs ---------------------------------------------


def test_programs_share_an_arena() -> None:
    x = placeholder("x", (4, 64))
    small, large = O.sum(silu(O.scale(x, by=2.0))), O.sum(O.matmul(silu(x), O.scale(x, by=3.0)))
    arrays = {x: random(4, 64)}
    apart = [reference([each], arrays) for each in (small, large)]
    arena = allocate(max(program.plan.arena for program in apart))
    shared = [Program.build([each], arrays, kernels="reference", arena=arena) for each in (small, large)]
    for _ in range(2):
        for mine, own, output in zip(shared, apart, (small, large), strict=True):
            own()
            mine()
            assert np.shares_memory(mine.read(output), arena)
            np.testing.assert_array_equal(mine.read(output), own.read(output))


def test_an_arena_that_will_not_do_is_refused() -> None:
    outputs = [O.sqr(placeholder("x", (100,)))]
    needed = reference(outputs).plan.arena
    read_only = allocate(needed)
    read_only.flags.writeable = False
    for arena in (
        allocate(needed - 1),
        allocate(needed).view(np.float32),
        read_only,
        allocate(needed + 1)[1:],
    ):
        with pytest.raises(GraphError, match="arena"):
            Program.build(outputs, kernels="reference", arena=arena)


# ---- what is not finite ----------------------------------------------------


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
def test_the_first_value_that_is_not_finite_is_found(kernels: str) -> None:
    x, w = placeholder("x", (2, 3)), parameter("blk.0.ffn_up", (3, 3))
    made = O.cast(O.matmul(x, w), dtype=BF16)
    loss = O.sum(O.log(O.cast(made, dtype=F32)))
    arrays = {x: np.ones((2, 3), np.float32), w: np.ones((3, 3), np.float32)}
    program = Program.build([loss], arrays, kernels=kernels)
    assert program.find_not_finite() is None
    program.write(w, -1.0)
    found = program.find_not_finite()
    assert describe(found) == "log of blk.0.ffn_up"
    arrays[w][1, 1] = 3e38
    arrays[x][0, 1] = 10
    assert describe(program.find_not_finite()) == "matmul of blk.0.ffn_up"
    program.write(x, [[3.4e38, 1, 1], [1, 1, 1]])  # finite, but not when rounded to bfloat16
    program.write(w, [1, 0, 0])
    found = program.find_not_finite()
    assert found.dtype is BF16 and describe(found) == "cast of blk.0.ffn_up"
    arrays[w][2, 0] = np.nan
    assert program.find_not_finite() is w


def test_masks_are_no_fault() -> None:
    x = placeholder("x", (3, 3))
    program = reference([O.sum(soft_max(O.diag_mask_inf(x, past=0)))], {x: random(3, 3)})
    assert program.find_not_finite() is None
    program.write(x, np.inf)
    assert program.find_not_finite() is x
    q, starts = placeholder("q", (1, 2, 1, 2)), placeholder("starts", (1, 2), I32)
    out, lse = flash_attn(q, q, q, starts, scale=1.0)
    program = reference([out, lse], {q: random(1, 2, 1, 2), starts: np.full((1, 2), 1, np.int32)})
    assert program.find_not_finite() is None
    assert program.read(lse)[0, 0, 0] == -np.inf
