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
from llamatrain.graph.fuse import fuse_sums
from llamatrain.graph.precision import round_results
from llamatrain.graph.rewrite import rebuild
from llamatrain.graph.tensor import (
    BF16,
    F32,
    F64,
    OPS,
    DType,
    Node,
    Tensor,
    collect_nodes,
    placeholder,
    quantized,
)
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
    """All but those that graphs for such devices never have."""
    from llamatrain.kernels.torch import registry

    device = create_device(DEVICE)
    assert not device.has_int8_products
    unused = {name for name in KERNELS if name.endswith("_int8")} | {"fake_quantize"}
    assert set(KERNELS) - unused == set(registry.KERNELS)


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
@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_a_llama(size: Size, precision: str) -> None:
    model = llama(size)
    check_gradients(model.loss, model.trained, model.random(), precision)


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_of_another_model(name: str, precision: str) -> None:
    block = Block(**BLOCKS[name])
    check_gradients(block.loss, block.trained, block.arrays(), precision)


def check_gradients(loss: Tensor, trained: list[Tensor], arrays: dict, precision: str) -> None:
    """In f32 they are equal. In bf16 they are as good as those of the definition, beside those in f32."""

    def outputs(precision: str) -> list[Tensor]:
        made = differentiate(loss, trained, precision=precision)
        return [made.loss, *made.grads.values()]

    found, defined = (run(outputs(precision), arrays, kernels) for kernels in (DEVICE, "reference"))
    exact = run(outputs("f32"), arrays, "reference")
    errors = [relative_error(here, true) for here, true in zip(found, exact, strict=True)]
    if precision == "f32":
        assert max(errors) <= 2e-5
        return
    usual = [relative_error(there, true) for there, true in zip(defined, exact, strict=True)]
    slack = 2 if "TRITON_INTERPRET" in os.environ else 1.2  # the interpreter cuts bits off and does not round
    assert np.mean(errors) <= slack * np.mean(usual) and max(errors) <= 2 * slack * max(usual)


def relative_error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted)) / max(float(np.linalg.norm(wanted)), 1e-9)


def test_an_op_without_a_torch_kernel_runs_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    from llamatrain.kernels.torch import registry

    model = llama(replace(SMALL, lora=4, base=quantized("Q4_0")))
    made = differentiate(model.loss, model.trained, precision="bf16")
    outputs, arrays = [made.loss, *made.grads.values()], model.random()
    create_device(DEVICE)
    for name in {node.op.name for node in collect_nodes(outputs)}:
        monkeypatch.delitem(registry.KERNELS, name, raising=False)
    fused = round_results(fuse_sums(outputs))
    for here, there in zip(run(outputs, arrays, DEVICE), run(fused, arrays, "reference"), strict=True):
        assert np.linalg.norm(here - there) <= 1e-2 * np.linalg.norm(there)


def test_sums_are_fused_with_the_products_that_they_add() -> None:
    """A LoRA layer and its gradients: each sum of products is a product that adds, and the results stay."""
    model = llama(replace(SMALL, lora=4))
    made = differentiate(model.loss, model.trained, precision="f32")
    outputs, arrays = [made.loss, *made.grads.values()], model.random()
    fused = fuse_sums(outputs)
    kinds = Counter(node.op.name for node in collect_nodes(fused))
    assert kinds["matmul_add"] and kinds["matmul_nn_add"]
    assert kinds["add"] < Counter(node.op.name for node in collect_nodes(outputs))["add"]
    for here, there in zip(run(fused, arrays, "reference"), run(outputs, arrays, "reference"), strict=True):
        np.testing.assert_allclose(here, there, rtol=1e-5, atol=1e-6)


def test_a_product_that_others_read_is_not_fused() -> None:
    x, y, w = (placeholder(name, shape) for name, shape in (("x", (2, 3)), ("y", (2, 4)), ("w", (4, 3))))
    product = ops.matmul(x, w)
    assert fuse_sums([ops.add(y, product), product])[0].node.op is ops.add
    assert fuse_sums([ops.add(y, ops.sqr(product))])[0].node.op is ops.add
    wider = placeholder("wider", (5, 2, 4))
    assert fuse_sums([ops.add(wider, ops.matmul(x, w))])[0].node.op is ops.add
    assert fuse_sums([ops.add(ops.matmul(x, w), y)])[0].node.op is ops.matmul_add


# ---- results in bf16 ---------------------------------------------------------

WITH_BF16 = {op.name for op in OPS.values() if op.bf16_sources or op.bf16_outputs}
# cases of two products whose sum can be fused, and of all ops that others are gradients of
BF16_CASES = {name: CASES[name] for name in WITH_BF16 & set(CASES)} | {
    "matmul_add": [lambda c: ops.add(c.x(3, 4), ops.matmul(c.x(3, 5), c.x(4, 5)))],
    "matmul_nn_add": [lambda c: ops.add(c.x(3, 4), ops.matmul_nn(c.x(3, 5), c.x(5, 4)))],
}


def in_bf16(node: Node) -> Node | list[Tensor]:
    """The node with all sources and results in bf16 that may be, between casts."""
    sources = [
        ops.cast(source, dtype=BF16) if index in node.op.bf16_sources and source.dtype is F32 else source
        for index, source in enumerate(node.sources)
    ]
    rounded = {index for index in node.op.bf16_outputs if node.outputs[index].dtype is F32}
    made = Node(node.op, tuple(sources), node.attrs, rounded=frozenset(rounded))
    return [ops.cast(output, dtype=F32) if output.dtype is BF16 else output for output in made.outputs]


@pytest.mark.parametrize(
    ("name", "index"), [(n, i) for n in sorted(BF16_CASES) for i in range(len(BF16_CASES[n]))]
)
def test_sources_and_results_in_bf16(name: str, index: int) -> None:
    """They are read as they are, and written with one rounding, here and by the definition."""
    case = Case(dtype=F32, seed=index)
    loss = scalar(case, BF16_CASES[name][index](case))
    outputs = fuse_sums([loss, *gradients(loss, case.wrt)])
    seen = {node.op.name for node in collect_nodes(outputs)}
    assert seen & WITH_BF16 and (name in seen or name not in ("matmul_add", "matmul_nn_add"))
    rounded = rebuild(outputs, {}, in_bf16)
    full = run(outputs, case.arrays, "reference")
    for kernels in (DEVICE, "reference"):
        for found, wanted in zip(run(rounded, case.arrays, kernels), full, strict=True):
            assert np.linalg.norm(found - wanted) <= 3e-2 * max(1, np.linalg.norm(wanted))


def test_what_only_rounding_readers_read_is_written_in_bf16() -> None:
    """The stream between blocks, results for the caller, and graphs without bf16 stay in float32."""
    model = llama(replace(SMALL, lora=4))
    full = differentiate(model.loss, model.trained, precision="f32")
    assert round_results([full.loss]) == [full.loss]
    made = differentiate(model.loss, model.trained, precision="bf16")
    outputs = [made.loss, *made.grads.values()]
    before, after = (collect_nodes(graph) for graph in (outputs, round_results(fuse_sums(outputs))))
    casts = [sum(node.op is ops.cast for node in nodes) for nodes in (before, after)]
    assert casts[1] < casts[0] / 2
    for node in after:
        assert not (node.op is ops.add and BF16 in {source.dtype for source in node.sources})
        if node.op is ops.rms_norm and node.sources[0].node:
            assert node.sources[0].dtype is F32 and node.outputs[0].dtype is BF16
        if node.op is ops.swiglu_back:
            assert {source.dtype for source in node.sources} == {BF16}


def test_a_result_that_is_also_asked_for_stays_in_float32() -> None:
    x, w = placeholder("x", (2, 3)), placeholder("w", (4, 3))
    product = ops.matmul(x, w)
    narrow = ops.cast(product, dtype=BF16)
    assert round_results([narrow])[0].node.op is ops.matmul
    assert round_results([narrow, product])[1].dtype is F32
    assert round_results([narrow, ops.sqr(product)])[0].node.op is ops.cast


def test_the_largest_product_of_a_sum_adds_to_the_others() -> None:
    x, thin = placeholder("x", (2, 64)), placeholder("thin", (2, 3))
    w, b, y = placeholder("w", (4, 64)), placeholder("b", (4, 3)), placeholder("y", (2, 4))
    for total in (
        ops.add(ops.add(ops.matmul(x, w), ops.matmul(thin, b)), y),
        ops.add(y, ops.add(ops.matmul(thin, b), ops.matmul(x, w))),
    ):
        last = fuse_sums([total])[0].node
        assert last.sources[1:] == (x, w)
        assert last.sources[0].node.sources == (y, thin, b)
