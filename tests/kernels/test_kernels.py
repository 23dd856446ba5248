"""The compiled kernels against the plain ones that define them: every op and its gradient, and whole llamas."""

from dataclasses import replace

import numpy as np
import pytest

from llamatrain.engine.program import Program
from llamatrain.graph.autodiff import gradients
from llamatrain.graph.ops import matmul
from llamatrain.graph.tensor import F32, placeholder, quantized, state
from llamatrain.optim.methods.adamw import AdamW
from llamatrain.optim.update_graph import differentiate, streamed_update
from tests.graph.test_gradients import EACH, scalar
from tests.helpers.model_block import BLOCKS, Block
from tests.helpers.op_cases import CASES, Case
from tests.helpers.random_models import TINY, Size, frozen_array, llama

SMALL = Size(vocab=300, width=96, layers=2, heads=6, kv_heads=2, ff=160, ctx=37, batch=3)


@pytest.mark.parametrize(("name", "index"), EACH)
def test_each_op_and_its_gradient(name: str, index: int) -> None:
    case = Case(dtype=F32, seed=index)
    loss = scalar(case, CASES[name][index](case))
    outputs = [loss, *gradients(loss, case.wrt)] if loss.dtype is F32 else [loss]
    plain, fast = (Program.build(outputs, case.arrays, kernels=kind) for kind in ("reference", "cpu"))
    plain(), fast()
    for output in outputs:
        np.testing.assert_allclose(
            fast.read(output),
            plain.read(output),
            rtol=2e-5,
            atol=2e-5 * max(1, np.abs(plain.read(output)).max(initial=0)),
        )


@pytest.mark.parametrize(
    "size",
    [
        TINY,
        SMALL,
        replace(SMALL, fused=False),
        replace(SMALL, lora=4),
        replace(SMALL, lora=4, base=quantized("Q4_0")),
    ],
    ids=["tiny", "small", "plain", "lora", "q4_0"],
)
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_a_llama(size: Size, precision: str) -> None:
    model = llama(size)
    made = differentiate(model.loss, model.trained, precision=precision)
    outputs = [made.loss, *made.grads.values()]
    arrays = model.random()
    plain, *fast = (
        Program.build(outputs, arrays, kernels=kind, threads=n)
        for kind, n in (("reference", 1), ("cpu", 1), ("cpu", 2))
    )
    for program in (plain, *fast):
        program()
    tolerance = {"f32": 2e-5, "bf16": 2e-2}[precision]
    for output in outputs:
        alone, together = (program.read(output) for program in fast)
        assert np.array_equal(alone, together), "one thread and two differ"
        distance = np.linalg.norm(alone - plain.read(output)) / (np.linalg.norm(plain.read(output)) + 1e-12)
        assert distance <= tolerance, f"{output!r}: {distance}"


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "llama"])
def test_a_block_of_another_model(name: str, precision: str) -> None:
    """By its compiled kernels alone: as by the plain ones, and the same bits whatever the number of threads."""
    block = Block(**BLOCKS[name])
    made = differentiate(block.loss, block.trained, precision=precision)
    outputs = [made.loss, *made.grads.values()]
    plain, *fast = (
        Program.build(outputs, block.arrays(), kernels=kind, threads=n)
        for kind, n in (("reference", 1), ("cpu", 1), ("cpu", 3))
    )
    assert [len(program.runs) for program in fast] == [1, 1]
    for program in (plain, *fast):
        program()
    for output in outputs:
        wanted, alone, together = (program.read(output) for program in (plain, *fast))
        assert np.array_equal(alone, together)
        assert np.linalg.norm(alone - wanted) <= {"f32": 2e-5, "bf16": 2e-2}[precision] * np.linalg.norm(
            wanted
        ), output


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_a_bias_beside_a_quantised_weight(rows: int) -> None:
    """In the steps of a decoder, and in those of a training."""
    rng = np.random.default_rng(0)
    x, w, bias = placeholder("x", (rows, 64)), state("w", (70, 64), quantized("Q8_0")), state("bias", (70,))
    arrays = {x: rng.standard_normal(x.shape).astype(np.float32), w: frozen_array(w, rng)}
    arrays[bias] = rng.standard_normal(70).astype(np.float32)
    y, alone = matmul(x, w, bias), matmul(x, w)
    fast, plain = (Program.build([y, alone], arrays, kernels=kind) for kind in ("cpu", "reference"))
    fast(), plain()
    np.testing.assert_array_equal(fast.read(y), fast.read(alone) + arrays[bias])
    np.testing.assert_allclose(fast.read(y), plain.read(y), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("remat", ["none", "block", "light"])
def test_ten_steps_the_same_bits_however_planned(remat: str) -> None:
    results = []
    for naive, threads, policy in ((True, 1, "none"), (False, 2, remat)):
        model = llama(SMALL)
        made = differentiate(model.loss, model.trained, borders=model.block_inputs, remat=policy)
        inputs, outputs = streamed_update(made, AdamW())
        arrays = model.random() | {inputs.schedule: np.array([1e-3, 0.1, 0.001], np.float32)}
        program = Program.build(outputs, arrays, threads=threads, naive=naive)
        losses = []
        for _ in range(10):
            program()
            losses.append(float(program.read(outputs[0])))
        results.append((losses, [arrays[weight].copy() for weight in model.trained]))
    assert results[0][0] == results[1][0]
    assert results[0][0][-1] < results[0][0][0]
    assert all(np.array_equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_a_training_step_is_one_table() -> None:
    """Nothing in it comes back to Python: every op has its compiled kernel."""
    for precision in ("f32", "bf16"):
        model = llama(replace(SMALL, lora=0))
        _, outputs = streamed_update(differentiate(model.loss, model.trained, precision=precision), AdamW())
        assert len(Program.build(outputs, model.random(), threads=2).runs) == 1
