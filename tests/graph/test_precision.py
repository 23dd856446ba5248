"""bfloat16 as a rewrite: what is rounded, what is kept for gradients, and losses that still follow float32."""

import numpy as np
import pytest

from llamatrain.engine.program import Program
from llamatrain.graph import ops as O
from llamatrain.graph.op_cost import estimate_cost
from llamatrain.graph.ops import flash_attn, swiglu, swiglu_back
from llamatrain.graph.precision import round_products
from llamatrain.graph.tensor import BF16, F32, I32, Tensor, collect_nodes, parameter, placeholder
from llamatrain.kernels.reference.registry import from_bf16, to_bf16
from llamatrain.optim.update_graph import differentiate
from tests.helpers.llama_step import LlamaStep
from tests.helpers.model_block import BLOCKS, Block
from tests.helpers.random_models import Size, llama

SIZE = Size(vocab=64, width=64, layers=2, heads=4, kv_heads=2, ff=176, ctx=24, batch=2)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def of(outputs: list[Tensor], op: str) -> list:
    return [node for node in collect_nodes(outputs) if node.op.name == op]


def test_a_gate_keeps_halves_and_gives_halves_to_products() -> None:
    x, ws = placeholder("x", (4, 8)), [parameter(name, (8, 8)) for name in ("gate", "up", "down")]
    gated = swiglu(O.matmul(x, ws[0]), O.matmul(x, ws[1]))
    outputs = round_products([O.sum(O.matmul(gated, ws[2]))])
    (gate,) = of(outputs, "swiglu")
    assert {each.dtype for each in (*gate.sources, *gate.outputs)} == {BF16}
    assert len(of(outputs, "cast")) == 3  # x, gate and up: nothing is widened, nothing rounded twice


def test_who_is_no_product_reads_a_gate_in_full() -> None:
    gate, up = placeholder("gate", (4, 8)), placeholder("up", (4, 8))
    (out,) = round_products([O.scale(swiglu(gate, up), by=2.0)])
    program = Program.build([out], {gate: random(4, 8), up: random(4, 8, seed=1)}, kernels="reference")
    program()
    assert out.dtype is F32
    rounded = [
        from_bf16(to_bf16(array)).astype(np.float64) for array in (program.read(gate), program.read(up))
    ]
    np.testing.assert_allclose(
        program.read(out), 2 * rounded[0] / (1 + np.exp(-rounded[0])) * rounded[1], rtol=2**-8
    )


def test_one_rounding_serves_every_shape() -> None:
    q, starts = placeholder("q", (1, 4, 2, 8)), placeholder("starts", (1, 4), I32)
    out, _ = flash_attn(q, q, q, starts, scale=1.0)
    flat = O.reshape(out, shape=(4, 16))
    outputs = round_products(
        [O.sum(O.matmul(flat, parameter("w", (3, 16)))), O.sum(O.matmul(out, parameter("v", (1, 5, 8))))]
    )
    assert len(of(outputs, "cast")) == 2  # q, and out


def test_fused_products_cost_no_more_casts_than_those_of_a_llama() -> None:
    """What is cut in parts is rounded where the parts are; what is joined for a product is rounded as it is joined."""
    moved = []
    for name in ("llama", "phi3"):
        block = Block(**BLOCKS[name])
        found = differentiate(block.loss, block.trained, precision="bf16")
        outputs = [found.loss, *found.grads.values()]
        moved.append(sum(estimate_cost(node).bytes_moved for node in of(outputs, "cast")))
        products = {
            t
            for name in ("matmul", "matmul_nn", "out_prod")
            for node in of(outputs, name)
            for t in node.sources
        }
        assert {t.dtype for t in products if t.role != "parameter"} == {BF16}
    assert moved[1] < moved[0]  # those of dq, dk and dv are the join
    assert {part.dtype for node in of(outputs, "join_columns") for part in node.outputs} == {BF16}
    assert {part.dtype for node in of(outputs, "swiglu_halves_back") for part in node.outputs} == {BF16}


def test_gelus_gate_is_rounded_as_silus_is() -> None:
    seen = []
    for gelu in (False, True):
        block = Block(gelu=gelu)
        found = differentiate(block.loss, block.trained, precision="bf16")
        seen.append(
            [
                node.op.name.replace("geglu", "swiglu")
                for node in collect_nodes([found.loss, *found.grads.values()])
            ]
        )
    assert seen[0] == seen[1]


def test_a_bias_is_not_rounded() -> None:
    x, w, bias = placeholder("x", (6, 8)), parameter("w", (5, 8)), parameter("bias", (5,))
    found = differentiate(O.sum(O.sqr(O.matmul(x, w, bias))), [w, bias], precision="bf16")
    (node,) = of([found.loss], "matmul")
    assert [source.dtype for source in node.sources] == [BF16, F32, F32] and node.outputs[0].dtype is F32
    arrays = {x: random(6, 8), w: random(5, 8, seed=1), bias: random(5, seed=2) * 1.001}
    program = Program.build([found.loss, found.grads[bias]], arrays, kernels="cpu")
    program()
    y = (
        from_bf16(to_bf16(arrays[x])).astype(np.float64) @ from_bf16(to_bf16(arrays[w])).T.astype(np.float64)
        + arrays[bias]
    )
    np.testing.assert_allclose(program.read(found.grads[bias]), 2 * y.sum(axis=0), rtol=1e-5)


def test_what_a_llama_keeps_for_its_gradients() -> None:
    """Of a block: the residuals, and nothing else in full."""
    m = llama(SIZE)
    made = differentiate(m.loss, m.trained, precision="bf16")
    outputs = [made.loss, *made.grads.values()]
    for node in of(outputs, "swiglu_back"):
        assert [source.dtype for source in node.sources] == [F32, BF16, BF16]
    for node in of(outputs, "flash_attn_back"):
        assert [source.dtype for source in node.sources[1:5]] == [BF16] * 4
    products = {
        t for name in ("matmul", "matmul_nn", "out_prod") for node in of(outputs, name) for t in node.sources
    }
    assert {t.dtype for t in products if t.role != "parameter"} == {BF16}


@pytest.mark.parametrize("shape", [(64, 32), (7, 13)])
def test_compiled_gates_in_bf16(shape: tuple[int, ...]) -> None:
    dy, gate, up = placeholder("dy", shape), placeholder("gate", shape, BF16), placeholder("up", shape, BF16)
    outputs = [O.cast(each, dtype=F32) for each in (swiglu(gate, up), *swiglu_back(dy, gate, up))]
    arrays = {dy: random(*shape), gate: to_bf16(random(*shape, seed=1)), up: to_bf16(random(*shape, seed=2))}
    arrays[gate][0, :1] = to_bf16(np.full(1, -200, np.float32))
    found = []
    for kernels, threads in (("reference", 1), ("cpu", 1), ("cpu", 2)):
        program = Program.build(
            outputs, {leaf: array.copy() for leaf, array in arrays.items()}, kernels=kernels, threads=threads
        )
        program()
        found.append([program.read(output).copy() for output in outputs])
    for plain, one, two in zip(*found, strict=True):
        assert one.tobytes() == two.tobytes()
        np.testing.assert_allclose(one, plain, rtol=2**-7, atol=1e-30)


@pytest.mark.parametrize("remat", ["none", "block"])
def test_losses_follow_float32(remat: str) -> None:
    full, half = (
        LlamaStep(SIZE, precision=precision, threads=2, remat=remat, two_programs=True)
        for precision in ("f32", "bf16")
    )
    losses = np.array([[step(rate=3e-4) for _ in range(30)] for step in (full, half)])
    assert losses[0, -1] < losses[0, 0] - 0.5
    np.testing.assert_allclose(*losses, rtol=0, atol=2e-2)
    assert not np.array_equal(*losses)
