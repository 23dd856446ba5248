"""Convolution and pooling of images (N, C, H, W), by windows that move over the last two axes.

A convolution is a product with the matrix of all windows (im2col). Its rows are the elements of a window and its
columns the positions, so that copying a row of an image is copying a row of the matrix.
"""

from dataclasses import dataclass

from llamatrain.errors import GraphError
from llamatrain.graph.ops.arithmetic import add
from llamatrain.graph.ops.matmul import matmul_nn
from llamatrain.graph.ops.movement import permute, reshape
from llamatrain.graph.ops.shape_rules import SECOND, floats, require
from llamatrain.graph.tensor import Node, Shape, Spec, Tensor, gradient, op

Pair = tuple[int, int]  # of height and width


def pair(size: int | Pair) -> Pair:
    """Return a number for both axes as a pair."""
    return size if isinstance(size, tuple) else (size, size)


@dataclass(frozen=True)
class Window:
    """A window that moves over height and width. Padding is on both sides, and dilation spreads its elements."""

    size: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)

    @property
    def extent(self) -> Pair:
        """The height and width that the window covers."""
        height, width = ((size - 1) * step + 1 for size, step in zip(self.size, self.dilation, strict=True))
        return height, width

    def count_positions(self, image: Shape) -> Pair:
        """Return the number of positions along height and width of an image."""
        for name, sizes, least in (
            ("size", self.size, 1),
            ("stride", self.stride, 1),
            ("padding", self.padding, 0),
            ("dilation", self.dilation, 1),
        ):
            whole = all(isinstance(size, int) for size in sizes) and len(sizes) == 2
            require(
                whole and min(sizes) >= least,
                f"needs two whole numbers of at least {least} as {name}, not {sizes}",
            )
        height, width = (
            (size + 2 * padding - extent) // stride + 1
            for size, padding, extent, stride in zip(
                image[-2:], self.padding, self.extent, self.stride, strict=True
            )
        )
        require(height > 0 and width > 0, f"a window of {list(self.extent)} does not fit the padded image")
        return height, width


def _check_images(x: Spec) -> None:
    require(len(x.shape) == 4, "needs images (N, C, H, W)")
    floats(x)


# ---- convolution -----------------------------------------------------------


@op()
def im2col(x: Spec, *, window: Window) -> Spec:
    """Return the windows of all positions: (N, C, H, W) -> (C · elements, N · positions)."""
    _check_images(x)
    (count, channels), (height, width) = x.shape[:2], window.count_positions(x.shape)
    return Spec((channels * window.size[0] * window.size[1], count * height * width), x.dtype)


@gradient(im2col)
def _(node: Node, dy: Tensor):
    return (col2im(dy, shape=node.sources[0].shape, window=node.attrs["window"]),)


@op()
def col2im(y: Spec, *, shape: Shape, window: Window) -> Spec:
    """Return images of a shape, each element the sum of its copies in windows: the transpose of im2col."""
    made = Spec(tuple(shape), floats(y))
    (columns,) = im2col.infer_specs(made, window=window)
    require(y == columns, f"needs the windows {list(columns.shape)} of images {list(shape)}")
    return made


@gradient(col2im)
def _(node: Node, dx: Tensor):
    return (im2col(dx, window=node.attrs["window"]),)


def conv_2d(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int | Pair = 1,
    padding: int | Pair = 0,
    dilation: int | Pair = 1,
) -> Tensor:
    """Return the convolution of images with filters: (N, C, H, W), (O, C, h, w), (O,) -> (N, O, H', W')."""
    if len(x.shape) != 4 or len(w.shape) != 4 or w.shape[1] != x.shape[1]:
        raise GraphError(
            f"conv_2d needs images (N, C, H, W) and filters (O, C, h, w) (got {x!r} and {w!r})",
            code="invalid-shape",
        )
    filters, channels, height, width = w.shape
    window = Window((height, width), pair(stride), pair(padding), pair(dilation))
    columns = im2col(x, window=window)
    y = matmul_nn(reshape(w, shape=(filters, channels * height * width)), columns)
    if bias is not None:
        y = add(y, reshape(bias, shape=(filters, 1)))
    images = reshape(y, shape=(filters, x.shape[0], *window.count_positions(x.shape)))
    return permute(images, axes=(1, 0, 2, 3))


# ---- pooling ---------------------------------------------------------------


def _pool(x: Spec, window: Window) -> Spec:
    _check_images(x)
    positions = window.count_positions(x.shape)
    inside = all(2 * padding <= size for padding, size in zip(window.padding, window.size, strict=True))
    require(inside, f"padding {list(window.padding)} is more than half of the window {list(window.size)}")
    return Spec((*x.shape[:2], *positions), x.dtype)


@op()
def max_pool_2d(x: Spec, *, window: Window) -> Spec:
    """Return the largest element of each window; padding is never the largest."""
    return _pool(x, window)


@gradient(max_pool_2d)
def _(node: Node, dy: Tensor):
    return (max_pool_2d_back(dy, node.sources[0], window=node.attrs["window"]),)


@op(no_gradient=SECOND)
def max_pool_2d_back(dy: Spec, x: Spec, *, window: Window) -> Spec:
    """Return dy at the place of each window's largest element, the first of equal ones."""
    require(dy == _pool(x, window), "needs dy like the pooled images")
    return x


@op()
def avg_pool_2d(x: Spec, *, window: Window) -> Spec:
    """Return the mean of each window, in which padding counts as zeros."""
    return _pool(x, window)


@gradient(avg_pool_2d)
def _(node: Node, dy: Tensor):
    return (avg_pool_2d_back(dy, shape=node.sources[0].shape, window=node.attrs["window"]),)


@op()
def avg_pool_2d_back(dy: Spec, *, shape: Shape, window: Window) -> Spec:
    """Return images of a shape, each element the sum of its shares in the means: the transpose of avg_pool_2d."""
    made = Spec(tuple(shape), floats(dy))
    require(dy == _pool(made, window), f"needs dy like the pooled images of {list(shape)}")
    return made


@gradient(avg_pool_2d_back)
def _(node: Node, dx: Tensor):
    return (avg_pool_2d(dx, window=node.attrs["window"]),)


def pool_2d(
    x: Tensor,
    size: int | Pair,
    *,
    kind: str = "max",
    stride: int | Pair | None = None,
    padding: int | Pair = 0,
) -> Tensor:
    """Return the largest element ("max") or the mean ("average") of windows, by default side by side."""
    pools = {"max": max_pool_2d, "average": avg_pool_2d}
    if kind not in pools:
        raise GraphError(f"a pool must be {' or '.join(pools)} (got {kind!r})", code="unknown-pool")
    window = Window(pair(size), pair(size if stride is None else stride), pair(padding))
    pooled: Tensor = pools[kind](x, window=window)
    return pooled
