"""The torch kernels against the numpy kernels that define them.

They run on torch's CPU device, or on the one that LLAMATRAIN_TEST_DEVICE names.
"""

import os
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from llamatrain.engine.device import create_device
from llamatrain.engine.program import Program
from llamatrain.graph import ops
from llamatrain.graph.autodiff import gradients
from llamatrain.graph.fuse import fuse, fuse_cast, fuse_sum
from llamatrain.graph.tensor import F32, F64, DType, Tensor, collect_nodes, placeholder, quantized
from llamatrain.kernels.reference.registry import KERNELS
from llamatrain.optim.update_graph import differentiate
from tests.graph.test_gradients import EACH, scalar
from tests.helpers.model_block import BLOCKS, Block
from tests.helpers.op_cases import CASES, Case
from tests.helpers.random_models import TINY, Size, llama
from tests.kernels.test_kernels import SMALL

pytestmark = pytest.mark.reference


DEVICE = os.environ.get("LLAMATRAIN_TEST_DEVICE", "torch-cpu")
RUNS = {"reference": 1, "torch-cpu": 1}  # others record the second run, and launch the recording


def run(outputs: list[Tensor], arrays: dict[Tensor, np.ndarray], kernels: str) -> list[np.ndarray]:
    device = create_device(kernels)
    memory = {leaf: device.upload(array.copy()) for leaf, array in arrays.items()}
    program, results = Program.build(outputs, memory, kernels=kernels), []
    for _ in range(RUNS.get(kernels, 3)):
        program()
        results.append([program.read(output).copy() for output in outputs])
    for first, last in zip(results[0], results[-1], strict=True):
        np.testing.assert_array_equal(last, first)
    return results[0]


@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-9), (F32, 3e-5)], ids=["f64", "f32"])
@pytest.mark.parametrize(("name", "index"), EACH)
def test_each_op_and_its_gradient(name: str, index: int, dtype: DType, tolerance: float) -> None:
    case = Case(dtype=dtype, seed=index)
    made = CASES[name][index](case)
    outputs = list(made) if isinstance(made, tuple) else [made]
    loss = scalar(case, made)
    outputs += gradients(loss, case.wrt) if loss.dtype is dtype else []
    for found, wanted in zip(
        run(outputs, case.arrays, DEVICE), run(outputs, case.arrays, "reference"), strict=True
    ):
        assert found.dtype == wanted.dtype
        bound = tolerance * max(1, np.abs(wanted[np.isfinite(wanted)]).max(initial=0))
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=bound)


def test_every_op_has_a_torch_kernel() -> None:
    from llamatrain.kernels.torch import registry

    create_device(DEVICE)
    assert set(KERNELS) == set(registry.KERNELS)


@pytest.mark.parametrize(
    "size",
    [
        TINY,
        SMALL,
        replace(SMALL, fused=False),
        replace(SMALL, lora=4),
        *(
            replace(SMALL, lora=4, base=quantized(kind), width=256, heads=4, ff=256)
            for kind in ("Q4_K", "Q6_K", "Q8_0")
        ),
    ],
    ids=["tiny", "small", "plain", "lora", "q4_k", "q6_k", "q8_0"],
)
@pytest.mark.parametrize(("precision", "tolerance"), [("f32", 2e-5), ("bf16", 2e-2)])
def test_a_llama(size: Size, precision: str, tolerance: float) -> None:
    model = llama(size)
    made = differentiate(model.loss, model.trained, precision=precision)
    outputs, arrays = [made.loss, *made.grads.values()], model.random()
    found, wanted = (run(outputs, arrays, kernels) for kernels in (DEVICE, "reference"))
    for output, here, there in zip(outputs, found, wanted, strict=True):
        assert np.linalg.norm(here - there) <= tolerance * np.linalg.norm(there) + 1e-12, output


@pytest.mark.parametrize(("precision", "tolerance"), [("f32", 2e-5), ("bf16", 2e-2)])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_of_another_model(name: str, precision: str, tolerance: float) -> None:
    block = Block(**BLOCKS[name])
    made = differentiate(block.loss, block.trained, precision=precision)
    outputs, arrays = [made.loss, *made.grads.values()], block.arrays()
    found, wanted = (run(outputs, arrays, kernels) for kernels in (DEVICE, "reference"))
    for output, here, there in zip(outputs, found, wanted, strict=True):
        assert np.linalg.norm(here - there) <= tolerance * np.linalg.norm(there) + 1e-12, output


def test_an_op_without_a_torch_kernel_runs_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    from llamatrain.kernels.torch import registry

    model = llama(replace(SMALL, lora=4, base=quantized("Q4_0")))
    made = differentiate(model.loss, model.trained, precision="bf16")
    outputs, arrays = [made.loss, *made.grads.values()], model.random()
    create_device(DEVICE)
    for name in {node.op.name for node in collect_nodes(outputs)}:
        monkeypatch.delitem(registry.KERNELS, name, raising=False)
    fused = fuse(outputs, fuse_sum, fuse_cast)
    for here, there in zip(run(outputs, arrays, DEVICE), run(fused, arrays, "reference"), strict=True):
        assert np.linalg.norm(here - there) <= 1e-2 * np.linalg.norm(there)


def test_sums_are_fused_with_the_products_that_they_add() -> None:
    """A LoRA layer and its gradients: each sum of products is a product that adds, and the results stay."""
    model = llama(replace(SMALL, lora=4))
    made = differentiate(model.loss, model.trained, precision="f32")
    outputs, arrays = [made.loss, *made.grads.values()], model.random()
    fused = fuse(outputs, fuse_sum, fuse_cast)
    kinds = Counter(node.op.name for node in collect_nodes(fused))
    assert kinds["matmul_add"] and kinds["matmul_nn_add"]
    assert kinds["add"] < Counter(node.op.name for node in collect_nodes(outputs))["add"]
    for here, there in zip(run(fused, arrays, "reference"), run(outputs, arrays, "reference"), strict=True):
        np.testing.assert_allclose(here, there, rtol=1e-5, atol=1e-6)


def test_a_product_that_others_read_is_not_fused() -> None:
    x, y, w = (placeholder(name, shape) for name, shape in (("x", (2, 3)), ("y", (2, 4)), ("w", (4, 3))))
    product = ops.matmul(x, w)
    assert fuse([ops.add(y, product), product], fuse_sum, fuse_cast)[0].node.op is ops.add
    assert fuse([ops.add(y, ops.sqr(product))], fuse_sum, fuse_cast)[0].node.op is ops.add
    wider = placeholder("wider", (5, 2, 4))
    assert fuse([ops.add(wider, ops.matmul(x, w))], fuse_sum, fuse_cast)[0].node.op is ops.add
    assert fuse([ops.add(ops.matmul(x, w), y)], fuse_sum, fuse_cast)[0].node.op is ops.matmul_add
