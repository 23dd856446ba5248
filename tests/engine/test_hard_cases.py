"""Inputs and graphs that once gave wrong numbers, read foreign memory, or ended in a traceback."""

import errno
import multiprocessing
import os
import tempfile

import numpy as np
import pytest

from llamatrain.compiler.store import ObjectStore
from llamatrain.engine.device import create_device
from llamatrain.engine.plan import plan
from llamatrain.engine.program import Program
from llamatrain.errors import GraphError
from llamatrain.graph import ops
from llamatrain.graph.tensor import BF16, I32, Tensor, parameter, placeholder, state
from llamatrain.optim.methods.adamw import AdamW
from llamatrain.optim.methods.sgd import SGD
from llamatrain.optim.update_graph import differentiate, streamed_update
from llamatrain.platform import cache_dir
from tests.helpers.random_models import Size, llama


def run(outputs: list[Tensor], memory: dict[Tensor, np.ndarray], **how) -> list[np.ndarray]:
    program = Program.build(outputs, {tensor: array.copy() for tensor, array in memory.items()}, **how)
    program()
    return [program.read(output).copy() for output in outputs]


def same_however_planned(outputs: list[Tensor], memory: dict[Tensor, np.ndarray]) -> None:
    wanted = run(outputs, memory, kernels="reference", naive=True)
    for naive in (True, False):
        for found, expected in zip(run(outputs, memory, threads=2, naive=naive), wanted, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_one_memory_read_twice_is_not_written_over() -> None:
    x, ids, weights, one = (
        placeholder("x", (4, 2)),
        placeholder("ids", (4,), I32),
        placeholder("w", (4,)),
        placeholder("d", ()),
    )
    values = np.arange(8, dtype=np.float32).reshape(4, 2)
    y, z = ops.scale(x, by=1.0), ops.soft_max(x)
    same_however_planned([ops.set_rows(y, y, ids)], {x: values, ids: np.array([3, 2, 1, 0], np.int32)})
    memory = {x: values, weights: np.ones(4, np.float32), one: np.ones((), np.float32)}
    same_however_planned([ops.cross_entropy_loss_back(one, z, z, weights)], memory)


def test_rows_of_a_state_moved_within_it() -> None:
    cache, ids = state("cache", (4, 2)), placeholder("ids", (2,), I32)
    rows = ops.view(cache, slices=((0, 2, 1), (0, 2, 1)))
    memory = {cache: np.arange(8, dtype=np.float32).reshape(4, 2), ids: np.array([1, 2], np.int32)}
    same_however_planned([ops.set_rows(cache, rows, ids, into=True)], memory)


def test_nothing_of_an_infinity_is_nothing() -> None:
    x, p, w = placeholder("x", (1, 3)), placeholder("p", (1, 3)), placeholder("w", (1,))
    memory = {
        x: np.array([[1, -np.inf, 2]], np.float32),
        p: np.array([[0.5, 0, 0.5]], np.float32),
        w: np.ones(1, np.float32),
    }
    same_however_planned([ops.cross_entropy_loss(x, p, w)], memory)


@pytest.mark.parametrize("optimizer", [AdamW(weight_decay=1), SGD(weight_decay=1, momentum=1)])
def test_whole_numbers_as_options(optimizer: AdamW | SGD) -> None:
    results = []
    for kernels in ("reference", "cpu"):
        w = parameter("w", (2, 3))
        made = differentiate(ops.sum_sqr(ops.rms_norm(w, ops.fill(shape=(3,), value=1), eps=1)), [w])
        inputs, outputs = streamed_update(made, optimizer)
        memory = {
            w: np.arange(1, 7, dtype=np.float32).reshape(2, 3),
            inputs.schedule: np.array([0.1, 0.1, 0.001], np.float32),
        }
        Program.build(outputs, memory, kernels=kernels)()
        results.append(memory[w])
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5)


@pytest.mark.parametrize("wild", [4, 2**31 - 1])
def test_numbers_beyond_the_rows_show_and_touch_no_foreign_memory(wild: int) -> None:
    ids, w, weights, one = (
        placeholder("ids", (3,), I32),
        placeholder("w", (4, 2)),
        placeholder("c", (3,)),
        placeholder("d", ()),
    )
    x = placeholder("x", (3, 2))
    memory = {
        ids: np.array([0, wild, 1], np.int32),
        w: np.ones((4, 2), np.float32),
        x: np.ones((3, 2), np.float32),
        weights: np.ones(3, np.float32),
        one: np.ones((), np.float32),
    }
    (taken,) = run([ops.get_rows(w, ids)], memory)
    assert np.isnan(taken[1]).all() and np.isfinite(taken[[0, 2]]).all()
    assert np.isnan(run([ops.cross_entropy_loss(ops.matmul(x, w), ids, weights)], memory)[0])
    assert np.isnan(run([ops.linear_cross_entropy(x, w, ids, weights)], memory)[0])
    loss, _dx, _dw = run(
        list(ops.linear_cross_entropy_back(one, x, w, ids, weights, dx=True, dw=True)), memory
    )
    assert np.isnan(loss)
    run([ops.cross_entropy_loss_back(one, ops.matmul(x, w), ids, weights)], memory)
    run([ops.set_rows(w, x, ids)], memory)
    q, table = placeholder("q", (1, 3, 1, 2)), placeholder("t", (2, 1, 2))
    memory |= {q: np.ones((1, 3, 1, 2), np.float32), table: np.ones((2, 1, 2), np.float32)}
    (turned,) = run([ops.rope(q, ops.reshape(ids, shape=(1, 3)), table)], memory)
    assert np.isnan(turned[0, 1]).all() and np.isfinite(turned[0, [0, 2]]).all()


def test_bfloat16_rows_of_odd_size_are_copied_whole() -> None:
    x = placeholder("x", (5,), BF16)
    memory = {x: np.arange(1, 6, dtype=np.uint16)}
    assert run([ops.cast(x, dtype=BF16)], memory)[0].tolist() == [1, 2, 3, 4, 5]
    cache, rows, ids = state("k", (3, 3), BF16), placeholder("r", (1, 3), BF16), placeholder("i", (1,), I32)
    memory = {
        cache: np.zeros((3, 3), np.uint16),
        rows: np.ones((1, 3), np.uint16),
        ids: np.array([1], np.int32),
    }
    assert run([ops.set_rows(cache, rows, ids, into=True)], memory)[0].sum() == 3


def test_memory_that_cannot_be_written_is_refused() -> None:
    cache, y = state("cache", (4,)), placeholder("y", (4,))
    frozen = np.zeros(4, np.float32)
    frozen.flags.writeable = False
    with pytest.raises(GraphError, match="read-only"):
        Program.build([ops.cpy(cache, y, into=True)], {cache: frozen})


def test_a_plan_without_the_kernels_scratch_is_refused() -> None:
    x, w = placeholder("x", (256, 512)), parameter("w", (512, 512))
    with pytest.raises(GraphError, match="scratch"):
        Program(plan([ops.matmul(x, w)]), {}, create_device())


@pytest.mark.parametrize("how", [{"kernels": "refrence"}, {"threads": 0}, {"threads": -1}])
def test_programs_that_cannot_be(how: dict) -> None:
    with pytest.raises(GraphError, match="got"):
        Program.build([ops.scale(placeholder("x", (2,)), by=2.0)], **how)


def test_graphs_that_cannot_be() -> None:
    x = placeholder("x", (2, 3))
    for make in (
        lambda: ops.add(x, 1.0),
        lambda: ops.add(x, np.ones(3)),
        lambda: ops.acc(x, x, slices=((0, 2), (0, 3))),
        lambda: ops.reshape(x, shape=(-2, -3)),
        lambda: placeholder("y", (-1, 3)),
        lambda: ops.fill(shape=(-2, -2), value=0.0),
        lambda: ops.cast(x, dtype="f32"),
        lambda: ops.scale(x, by="a"),
        lambda: ops.get_rows_back(x, placeholder("i", (2,), I32), rows=-1),
    ):
        with pytest.raises(GraphError):
            make()


def test_arrays_of_nothing() -> None:
    x, w = placeholder("x", (0, 3)), placeholder("w", (3,))
    for kernels in ("reference", "cpu"):
        outputs = [
            ops.rms_norm(x, w, eps=1e-5),
            ops.soft_max(x),
            ops.sum(x),
            ops.silu(x) if hasattr(ops, "silu") else x,
        ]
        assert (
            run(outputs, {x: np.zeros((0, 3), np.float32), w: np.ones(3, np.float32)}, kernels=kernels)[2]
            == 0
        )


@pytest.mark.parametrize("layers_", [2, 4, 8])
def test_whatever_some_policy_fits_is_not_refused(layers_: int) -> None:
    model = llama(Size(vocab=64, width=32, layers=layers_, heads=4, kv_heads=4, ff=96, ctx=64, batch=2))

    def plan_with(policy: str | int):
        return plan(
            streamed_update(
                differentiate(model.loss, model.trained, borders=model.block_inputs, remat=policy), AdamW()
            )[1]
        )

    ladder = ("none", "light", *range(1, layers_ + 1), "block")
    totals = [plan_with(policy).total for policy in ladder]
    assert min(totals) < totals[0]
    assert totals[-1] <= 1.05 * min(totals)


def _in_the_child(results) -> None:
    x = placeholder("x", (1 << 16,))
    results.put(float(run([ops.sum(ops.scale(x, by=2.0))], {x: np.ones(1 << 16, np.float32)}, threads=2)[0]))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_computes_too() -> None:
    x = placeholder("x", (1 << 16,))
    run([ops.scale(x, by=2.0)], {x: np.ones(1 << 16, np.float32)}, threads=2)
    forking = multiprocessing.get_context("fork")
    results = forking.Queue()
    child = forking.Process(target=_in_the_child, args=(results,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert results.get(timeout=5) == 2 << 16


def test_without_a_home_things_are_kept_while_the_program_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LLAMATRAIN_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as it is where the home is not known
    folder = cache_dir.writable_cache_dir("x")
    assert (
        folder is not None
        and folder.is_relative_to(tempfile.gettempdir())
        and cache_dir.default_cache_dir("x") is None
    )
    kernels = ObjectStore(cache_dir.default_cache_dir("x"))
    kernels.save("name", b"file")
    assert kernels.problem == "there is no home" and kernels.in_memory == {"name": b"file"}
    monkeypatch.setattr("tempfile.mkdtemp", lambda **_: no_room())
    cache_dir.get_temp_folder.cache_clear()
    assert cache_dir.writable_cache_dir("x") is None
    cache_dir.get_temp_folder.cache_clear()


def no_room() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")
