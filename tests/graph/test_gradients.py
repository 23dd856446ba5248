"""Every op's gradient against central differences in float64, and its first witness' witness: torch, where installed."""

from pkgutil import iter_modules

import numpy as np
import pytest

from llamatrain.engine.program import Program
from llamatrain.errors import GraphError
from llamatrain.graph import ops
from llamatrain.graph.autodiff import gradients
from llamatrain.graph.tensor import OPS, Tensor, placeholder
from tests.helpers.op_cases import CASES, Case

STRAIGHT_THROUGH = ("fake_quantize",)  # their gradient is not their derivative (test_fake_quantize.py)
EACH = [(name, index) for name, makes in CASES.items() for index in range(len(makes))]


def scalar(case: Case, made: Tensor) -> Tensor:
    """A loss that weighs every element of an output differently."""
    if made.shape == ():
        return made
    weights = placeholder("weights", made.shape, made.dtype)
    case.arrays[weights] = np.cos(np.arange(made.size)).reshape(made.shape).astype(made.dtype.numpy)
    return ops.sum(ops.mul(made, weights))


def run(loss: Tensor, case: Case, outputs: list[Tensor]) -> list[np.ndarray]:
    program = Program.build([loss, *outputs], case.arrays, kernels="reference")
    program()
    return [program.read(tensor).copy() for tensor in (loss, *outputs)]


def test_every_family_of_ops_is_among_the_ops() -> None:
    families = {each.name for each in iter_modules(ops.__path__)}
    assert {op.rule.__module__.rpartition(".")[2] for op in OPS.values()} <= families
    for name, op in OPS.items():
        assert getattr(ops, name) is op, f"{name}: {op.rule.__module__} is not imported by graph/ops"
    assert all(hasattr(ops, family) for family in families)


def test_every_op_has_cases_or_says_why_it_has_no_gradient() -> None:
    for name, op in OPS.items():
        has_derivative = op.gradient is not None and name not in STRAIGHT_THROUGH
        assert (name in CASES) == (has_derivative or name == "fill"), name
        assert op.gradient or op.no_gradient, name
        assert name not in CASES or len(CASES[name]) >= 3, name


@pytest.mark.parametrize(("name", "index"), EACH)
def test_gradient_is_the_difference_quotient(name: str, index: int) -> None:
    case = Case(seed=index)
    loss = scalar(case, CASES[name][index](case))
    grads = gradients(loss, case.wrt)
    found = run(loss, case, grads)[1:]
    program = Program.build([loss], case.arrays, kernels="reference")
    for tensor, grad in zip(case.wrt, found, strict=True):
        values, step = case.arrays[tensor], 1e-5
        numeric = np.zeros_like(values)
        for place in np.ndindex(values.shape):
            kept, sides = values[place], []
            for side in (step, -step):
                values[place] = kept + side
                program()
                sides.append(float(program.read(loss)))
            values[place] = kept
            numeric[place] = (sides[0] - sides[1]) / (2 * step)
        assert np.abs(numeric - grad).max(initial=0) <= 1e-6 * max(1, np.abs(numeric).max(initial=0))


def test_no_gradient_goes_past_what_is_detached() -> None:
    case = Case()
    x, y = case.x(3), case.x(3)
    loss = ops.sum(ops.mul(y, ops.detached(ops.sqr(x))))
    np.testing.assert_allclose(run(loss, case, gradients(loss, [y]))[1], case.arrays[x] ** 2)
    with pytest.raises(GraphError, match="does not depend on"):
        gradients(loss, [x])
