"""Convolutions and pools against torch's own, and sizes that do not fit."""

from itertools import product
from typing import Any

import numpy as np
import pytest

from llamatrain.engine.program import Program
from llamatrain.errors import GraphError
from llamatrain.graph import ops
from llamatrain.graph.autodiff import gradients
from llamatrain.graph.ops.convolution import Window
from llamatrain.graph.tensor import I32, Tensor, placeholder

RANDOM = np.random.default_rng(3)
# stride, padding and dilation
MOVES = [(1, 0, 1), (2, 1, 1), ((3, 1), (0, 2), (1, 2)), (1, (1, 0), (2, 1))]


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def values_and_gradients(
    output: Tensor, weights: np.ndarray, arrays: dict[Tensor, np.ndarray], kernels: str = "cpu"
) -> list[np.ndarray]:
    """Return an output, and gradients of the sum of its weighted elements with respect to all leaves."""
    factor = placeholder("factor", output.shape)
    grads = gradients(ops.sum(ops.mul(output, factor)), list(arrays))
    program = Program.build([output, *grads], {**arrays, factor: weights}, kernels=kernels, threads=2)
    program()
    return [program.read(each).copy() for each in (output, *grads)]


def leaf(array: np.ndarray) -> Tensor:
    return placeholder("x", array.shape)


@pytest.mark.reference
@pytest.mark.parametrize(("stride", "padding", "dilation"), MOVES)
def test_convolution_is_torchs(stride: Any, padding: Any, dilation: Any) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    arrays = [normal(3, 4, 9, 8), normal(5, 4, 3, 2), normal(5)]
    theirs = [torch.from_numpy(array).requires_grad_() for array in arrays]
    wanted = torch.nn.functional.conv2d(*theirs, stride=stride, padding=padding, dilation=dilation)
    factor = normal(*wanted.shape)
    wanted.backward(torch.from_numpy(factor))
    ours = [leaf(array) for array in arrays]
    output = ops.conv_2d(*ours, stride=stride, padding=padding, dilation=dilation)
    found = values_and_gradients(output, factor, dict(zip(ours, arrays, strict=True)))
    for mine, tensor in zip(found, [wanted.detach(), *(each.grad for each in theirs)], strict=True):
        np.testing.assert_allclose(mine, tensor.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.reference
@pytest.mark.parametrize("kind", ["max", "average"])
@pytest.mark.parametrize(("size", "stride", "padding"), [(2, None, 0), ((3, 2), (1, 3), (1, 1)), (3, 2, 1)])
def test_a_pool_is_torchs(kind: str, size: Any, stride: Any, padding: Any) -> None:
    """Many elements are equal: of those the first has the gradient."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x = np.round(normal(2, 3, 7, 8))
    tensor = torch.from_numpy(x).requires_grad_()
    pool = torch.nn.functional.max_pool2d if kind == "max" else torch.nn.functional.avg_pool2d
    wanted = pool(tensor, size, stride, padding)
    factor = normal(*wanted.shape)
    wanted.backward(torch.from_numpy(factor))
    images = leaf(x)
    output = ops.pool_2d(images, size, kind=kind, stride=stride, padding=padding)
    found = values_and_gradients(output, factor, {images: x})
    np.testing.assert_allclose(found[0], wanted.detach().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1], tensor.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_a_convolution_is_a_sum_of_shifted_images() -> None:
    x, w = normal(2, 3, 6, 5), normal(4, 3, 3, 2)
    wanted = np.zeros((2, 4, 4, 4), np.float32)
    for row, column in product(range(3), range(2)):
        part = x[:, :, row : row + 4, column : column + 4]
        wanted += np.einsum("nchw,oc->nohw", part, w[:, :, row, column])
    images, filters = leaf(x), leaf(w)
    program = Program.build([output := ops.conv_2d(images, filters)], {images: x, filters: w})
    program()
    np.testing.assert_allclose(program.read(output), wanted, rtol=1e-4, atol=1e-5)


IMAGES = placeholder("images", (2, 3, 6, 5))
FILTERS = placeholder("filters", (4, 3, 3, 3))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ops.conv_2d(IMAGES, placeholder("w", (4, 2, 3, 3))), "conv_2d needs images"),
        (lambda: ops.conv_2d(placeholder("x", (3, 6, 5)), FILTERS), "conv_2d needs images"),
        (lambda: ops.conv_2d(IMAGES, placeholder("w", (4, 3, 7, 3))), "does not fit the padded image"),
        (lambda: ops.conv_2d(IMAGES, FILTERS, dilation=3), r"a window of \[7, 7\] does not fit"),
        (lambda: ops.conv_2d(IMAGES, FILTERS, stride=0), "at least 1 as stride"),
        (lambda: ops.conv_2d(IMAGES, FILTERS, stride=1.5), "whole numbers"),
        (lambda: ops.conv_2d(IMAGES, FILTERS, padding=-1), "at least 0 as padding"),
        (lambda: ops.conv_2d(IMAGES, FILTERS, padding=(1, 1, 1)), "two whole numbers"),
        (lambda: ops.im2col(placeholder("x", (2, 3, 6, 5), I32), window=Window((2, 2))), "float type"),
        (lambda: ops.pool_2d(IMAGES, 2, kind="median"), "must be max or average"),
        (lambda: ops.pool_2d(IMAGES, 3, padding=2), "more than half of the window"),
        (lambda: ops.pool_2d(placeholder("x", (6, 5)), 2), "needs images"),
        (lambda: ops.col2im(IMAGES, shape=(2, 3, 6, 5), window=Window((2, 2))), "needs the windows"),
    ],
)
def test_what_does_not_fit_is_refused(build: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        build()
