"""Torch kernels of convolution and pooling: those of `kernels/reference/convolution.py` with torch's tensors.

torch's own gradients of pools add up in any order on graphics cards; these have the same bits in each run.
"""

import math
from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import pad

from llamatrain.graph.ops.convolution import Window
from llamatrain.graph.tensor import Node
from llamatrain.kernels.reference.convolution import crop_images, window_elements
from llamatrain.kernels.torch.registry import kernel


def padded_bytes(node: Node) -> int:
    """Return the bytes of results and of padded images; padding is at most half of a window for pools."""
    return 4 * sum(tensor.nbytes for tensor in (*node.sources, *node.outputs))


def pad_images(x: Tensor, window: Window, fill: float = 0.0) -> Tensor:
    """Return images with a border of `fill`."""
    (vertical, horizontal) = window.padding
    return pad(x, (horizontal, horizontal, vertical, vertical), value=fill)


@kernel(padded_bytes)
def im2col(x: Tensor, *, window: Window) -> Tensor:
    """Return the windows of all positions: (N, C, H, W) -> (C · elements, N · positions)."""
    elements = list(window_elements(pad_images(x, window), window))
    return torch.stack([element.transpose(0, 1) for element in elements], 1).reshape(
        x.shape[1] * len(elements), -1
    )


@kernel(padded_bytes)
def col2im(y: Tensor, *, shape: tuple[int, ...], window: Window) -> Tensor:
    """Return images of a shape, each element the sum of its copies in windows: the transpose of im2col."""
    padded = pad_images(y.new_zeros(shape), window)
    elements = list(window_elements(padded, window))
    columns = y.reshape(shape[1], len(elements), shape[0], *elements[0].shape[2:])
    for number, element in enumerate(elements):
        element += columns[:, number].transpose(0, 1)
    return crop_images(padded, window)


@kernel(padded_bytes)
def max_pool_2d(x: Tensor, *, window: Window) -> Tensor:
    """Return the largest element of each window; padding is never the largest."""
    return reduce(torch.maximum, window_elements(pad_images(x, window, -math.inf), window))


@kernel(padded_bytes)
def max_pool_2d_back(dy: Tensor, x: Tensor, *, window: Window) -> Tensor:
    """Return dy at the place of each window's largest element, the first of equal ones."""
    padded, grads = pad_images(x, window, -math.inf), pad_images(torch.zeros_like(x), window)
    largest = reduce(torch.maximum, window_elements(padded, window))
    is_open = torch.ones_like(dy, dtype=torch.bool)
    for element, grad in zip(window_elements(padded, window), window_elements(grads, window), strict=True):
        found = is_open & (element == largest)
        grad += torch.where(found, dy, 0)
        is_open &= ~found
    return crop_images(grads, window)


@kernel(padded_bytes)
def avg_pool_2d(x: Tensor, *, window: Window) -> Tensor:
    """Return the mean of each window, in which padding counts as zeros."""
    return reduce(torch.add, window_elements(pad_images(x, window), window)) / math.prod(window.size)


@kernel(padded_bytes)
def avg_pool_2d_back(dy: Tensor, *, shape: tuple[int, ...], window: Window) -> Tensor:
    """Return images of a shape, each element the sum of its shares in the means: the transpose of avg_pool_2d."""
    padded, share = pad_images(dy.new_zeros(shape), window), dy / math.prod(window.size)
    for element in window_elements(padded, window):
        element += share
    return crop_images(padded, window)
