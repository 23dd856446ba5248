"""Rounding to quantized types: its values, and the gradient that passes straight through."""

import gguf
import numpy as np
import pytest

from llamatrain.engine.program import Program
from llamatrain.errors import GraphError
from llamatrain.gguf import quants
from llamatrain.gguf.type_names import QuantizedName
from llamatrain.gguf.types import type_by_name
from llamatrain.graph import ops
from llamatrain.graph.autodiff import gradients
from llamatrain.graph.rewrite import read_stored
from llamatrain.graph.tensor import F32, F64, DType, Tensor, parameter, placeholder, quantized, state
from llamatrain.optim.update_graph import differentiate

KINDS = [name.upper() for name in QuantizedName.__args__]
PLAIN = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]  # the `gguf` package encodes them, too
ROWS, WIDTH = 6, 256


def weight(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((ROWS, WIDTH)).astype(np.float32)


def run(
    outputs: list[Tensor], arrays: dict[Tensor, np.ndarray], kernels: str = "reference"
) -> list[np.ndarray]:
    program = Program.build(outputs, arrays, kernels=kernels)
    program()
    return [program.read(output).copy() for output in outputs]


def rounded_by_gguf(w: np.ndarray, kind: str) -> np.ndarray:
    number = gguf.GGMLQuantizationType[kind]
    raw = gguf.quantize(w, number) if kind in PLAIN else quants.encode(w, type_by_name(kind))
    return gguf.dequantize(raw, number)


# ---- values ------------------------------------------------------------------------------------


def test_options_name_the_types_that_can_be_written() -> None:
    assert {*KINDS} == {*quants.WRITABLE_TYPES} - {"F32", "F16", "BF16"}


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_an_exported_file(kind: str, kernels: str) -> None:
    w = placeholder("w", (ROWS, WIDTH))
    (found,) = run([ops.fake_quantize(w, kind=kind)], {w: weight()}, kernels)
    np.testing.assert_array_equal(found, rounded_by_gguf(weight(), kind))
    assert 0 < np.abs(found - weight()).max() < 2


def test_rounding_again_changes_nothing_in_q8_0() -> None:
    w = placeholder("w", (ROWS, WIDTH))
    once = ops.fake_quantize(w, kind="Q8_0")
    first, second = run([once, ops.fake_quantize(once, kind="Q8_0")], {w: weight()})
    np.testing.assert_array_equal(first, second)


def test_stacks_are_rounded_matrix_by_matrix() -> None:
    stack = np.stack([weight(1), 100 * weight(2)])
    w = placeholder("w", stack.shape)
    (found,) = run([ops.fake_quantize(w, kind="Q4_0")], {w: stack})
    for matrix, rounded in zip(stack, found, strict=True):
        np.testing.assert_array_equal(rounded, rounded_by_gguf(matrix, "Q4_0"))


@pytest.mark.parametrize(
    ("shape", "kind", "words"),
    [
        ((4, 33), "Q4_0", "whole Q4_0 blocks of 32"),
        ((), "Q8_0", "blocks of 32"),
        ((4, 32), "Q9_9", "no type"),
    ],
)
def test_what_cannot_be_rounded_is_refused(shape: tuple[int, ...], kind: str, words: str) -> None:
    with pytest.raises(GraphError, match=words):
        ops.fake_quantize(placeholder("w", shape), kind=kind)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e6])
def test_weights_that_have_no_code_are_refused(value: float) -> None:
    w, values = placeholder("w", (ROWS, WIDTH)), weight()
    values[2, 5] = value
    program = Program.build([ops.fake_quantize(w, kind="Q4_0")], {w: values}, kernels="reference")
    with pytest.raises(quants.QuantError, match="row 2, column 5"):
        program()


# ---- the gradient ------------------------------------------------------------------------------


def loss_of(w: Tensor, x: Tensor) -> Tensor:
    """Curved in w, so that a gradient depends on where it is taken."""
    return ops.sum(ops.sqr(ops.sqr(ops.matmul(x, w))))


def inputs(dtype: DType) -> tuple[Tensor, np.ndarray]:
    x = 0.1 * np.random.default_rng(9).standard_normal((5, WIDTH))
    return placeholder("x", x.shape, dtype), x.astype(dtype.numpy)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K"])
def test_the_gradient_is_that_of_the_rounded_weight(kind: str) -> None:
    """Central differences of the graph in which rounding adds what it adds to these weights, whatever they are."""
    (x, x_values), w = inputs(F64), placeholder("w", (ROWS, WIDTH), F64)
    values = weight().astype(np.float64)
    (found,) = run(gradients(loss_of(ops.fake_quantize(w, kind=kind), x), [w]), {x: x_values, w: values})
    shift = placeholder("shift", w.shape, F64)
    moved = {x: x_values, w: values, shift: rounded_by_gguf(weight(), kind) - values}
    program = Program.build([loss := loss_of(ops.add(w, shift), x)], moved, kernels="reference")
    random, step = np.random.default_rng(3), 1e-5
    for _ in range(20):
        place, sides = (random.integers(ROWS), random.integers(WIDTH)), []
        kept = values[place]
        for side in (step, -step):
            values[place] = kept + side
            program()
            sides.append(float(program.read(loss)))
        values[place] = kept
        assert (sides[0] - sides[1]) / (2 * step) == pytest.approx(found[place], rel=1e-6, abs=1e-8)
    (unrounded,) = run(gradients(loss_of(w, x), [w]), {x: x_values, w: values})
    assert np.abs(found - unrounded).max() > 1e-4 * np.abs(found).max()


@pytest.mark.reference
@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K"])
def test_torch_has_the_same_gradient(kind: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    (x, x_values), w = inputs(F32), placeholder("w", (ROWS, WIDTH))
    (found,) = run(gradients(loss_of(ops.fake_quantize(w, kind=kind), x), [w]), {x: x_values, w: weight()})
    leaf = torch.tensor(weight(), requires_grad=True)
    through = leaf + (torch.from_numpy(rounded_by_gguf(weight(), kind)) - leaf).detach()
    (torch.from_numpy(x_values) @ through.T).pow(4).sum().backward()
    np.testing.assert_allclose(found, leaf.grad.numpy(), rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("as_bytes", [True, False])
def test_stored_values_take_the_place_of_rounding(as_bytes: bool, kernels: str) -> None:
    """Also of products whose weights are quantized, and of a head whose loss and gradients come in one pass."""
    kind, (x, x_values) = "Q4_0", inputs(F32)
    w, stored = (
        parameter("w", (ROWS, WIDTH)),
        state("w.rounded", (ROWS, WIDTH), quantized(kind) if as_bytes else F32),
    )
    rounded = ops.fake_quantize(w, kind=kind)
    targets, weights = placeholder("targets", (5,), ops.I32), placeholder("weights", (5,))
    loss = ops.add(loss_of(rounded, x), ops.linear_cross_entropy(x, rounded, targets, weights))
    arrays = {x: x_values, targets: np.arange(5, dtype=np.int32), weights: np.ones(5, np.float32)}
    whole = differentiate(loss, [w])
    parts = differentiate(loss, [w], stored={rounded: stored})
    bytes_ = quants.encode(weight(), type_by_name(kind))
    value = bytes_ if as_bytes else quants.decode(bytes_, type_by_name(kind))
    wanted = run([whole.loss, whole.grads[w]], arrays | {w: weight()}, kernels)
    found = run([parts.loss, parts.grads[w]], arrays | {stored: value}, kernels)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert read_stored([loss], {}) == [loss]
