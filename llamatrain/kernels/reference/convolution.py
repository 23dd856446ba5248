"""Reference kernels of `graph/ops/convolution.py`, in the same order.

All of them go through a window's elements; each element is a part of the padded images, for all positions at once.
"""

import math
from collections.abc import Iterator
from functools import reduce
from itertools import product

import numpy as np

from llamatrain.graph.ops.convolution import Window
from llamatrain.kernels.reference.registry import kernel


def pad_images(x, window: Window, fill: float):
    """Return images with a border of `fill`; without a border they are not copied."""
    vertical, horizontal = window.padding
    around = ((0, 0), (0, 0), (vertical, vertical), (horizontal, horizontal))
    return np.pad(x, around, constant_values=fill) if any(window.padding) else x


def crop_images(padded, window: Window):
    """Return padded images without their border."""
    (top, left), (height, width) = window.padding, padded.shape[2:]
    return padded[:, :, top : height - top, left : width - left]


def empty_images(shape, window: Window, dtype):
    """Return padded images of zeros."""
    return pad_images(np.zeros(shape, dtype), window, 0)


def window_elements(padded, window: Window) -> Iterator[np.ndarray]:
    """Yield the views (N, C, H', W') of padded images that have one element of every window each."""
    (height, width), (down, right), (tall, wide) = padded.shape[2:], window.stride, window.extent
    for row, column in product(*map(range, window.size)):
        top, left = row * window.dilation[0], column * window.dilation[1]
        yield padded[:, :, top : top + height - tall + 1 : down, left : left + width - wide + 1 : right]


@kernel
def im2col(x, *, window):
    """Return the windows of all positions: (N, C, H, W) -> (C · elements, N · positions)."""
    elements = list(window_elements(pad_images(x, window, 0), window))
    count, channels, *positions = elements[0].shape
    columns = np.empty((channels, len(elements), count, *positions), x.dtype)
    for number, element in enumerate(elements):
        columns[:, number] = element.swapaxes(0, 1)
    return columns.reshape(channels * len(elements), -1)


@kernel
def col2im(y, *, shape, window):
    """Return images of a shape, each element the sum of its copies in windows: the transpose of im2col."""
    padded = empty_images(shape, window, y.dtype)
    elements = list(window_elements(padded, window))
    columns = y.reshape(shape[1], len(elements), shape[0], *elements[0].shape[2:])
    for number, element in enumerate(elements):
        element += columns[:, number].swapaxes(0, 1)
    return crop_images(padded, window)


@kernel
def max_pool_2d(x, *, window):
    """Return the largest element of each window; padding is never the largest."""
    return reduce(np.maximum, window_elements(pad_images(x, window, -math.inf), window))


@kernel
def max_pool_2d_back(dy, x, *, window):
    """Return dy at the place of each window's largest element, the first of equal ones."""
    padded, grads = pad_images(x, window, -math.inf), empty_images(x.shape, window, x.dtype)
    largest, is_open = reduce(np.maximum, window_elements(padded, window)), np.ones(dy.shape, bool)
    for element, grad in zip(window_elements(padded, window), window_elements(grads, window), strict=True):
        found = is_open & (element == largest)
        grad += dy * found
        is_open &= ~found
    return crop_images(grads, window)


@kernel
def avg_pool_2d(x, *, window):
    """Return the mean of each window, in which padding counts as zeros."""
    total = reduce(np.add, window_elements(pad_images(x, window, 0), window))
    return total / x.dtype.type(math.prod(window.size))


@kernel
def avg_pool_2d_back(dy, *, shape, window):
    """Return images of a shape, each element the sum of its shares in the means: the transpose of avg_pool_2d."""
    padded, share = empty_images(shape, window, dy.dtype), dy / dy.dtype.type(math.prod(window.size))
    for element in window_elements(padded, window):
        element += share
    return crop_images(padded, window)
