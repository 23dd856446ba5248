"""Norms over the last axis.

rms_norm(x, w) = x / rms(x) · w with rms(x) = sqrt(mean(x²) + eps). layer_norm(x, w, bias) = norm(x) · w + bias
with norm(x) = (x - mean(x)) / rms(x - mean(x)). norm alone is for graphs that users build themselves.
"""

from collections.abc import Callable

from llamatrain.graph.ops.activations import add_number
from llamatrain.graph.ops.arithmetic import add, mul, scale, sqr, sub
from llamatrain.graph.ops.ggml_extra import div, sqrt
from llamatrain.graph.ops.movement import fill, gradient_or_zeros
from llamatrain.graph.ops.reduce import sum_rows, sum_to
from llamatrain.graph.ops.shape_rules import floats, require
from llamatrain.graph.tensor import Node, Spec, Tensor, gradient, op


@op(in_place=((0, 0),), is_cheap=True, bf16_outputs=(0,))
def rms_norm(x: Spec, w: Spec, *, eps: float) -> Spec:
    """Return x / rms(x) · w."""
    require(len(w.shape) == 1 and x.shape[-1:] == w.shape, "needs one weight for each element of a row")
    return Spec(x.shape, floats(x, w))


@gradient(rms_norm)
def _(node: Node, dy: Tensor):
    x, w = node.sources
    return rms_norm_back(dy, x, w, eps=node.attrs["eps"])


@op(in_place=((0, 0), (0, 1)), bf16_sources=(0,))
def rms_norm_back(dy: Spec, x: Spec, w: Spec, *, eps: float) -> tuple[Spec, Spec]:
    """Return the gradients of x and w."""
    require(
        dy.shape == x.shape and x.shape[-1:] == w.shape,
        "needs dy like x, and one weight for each element of a row",
    )
    return Spec(x.shape, floats(dy, x, w)), w


@gradient(rms_norm_back)
def _(node: Node, dx: Tensor | None, dw: Tensor | None):
    (_dy, x, w), eps = node.sources, node.attrs["eps"]
    ones = fill(shape=w.shape, value=1.0, dtype=w.dtype)
    return weighted_gradients(
        node,
        (dx, dw),
        rms_norm(x, ones, eps=eps),
        rms(x, eps),
        lambda d: rms_norm_back(d, x, ones, eps=eps)[0],
    )


@op(in_place=((0, 0),), is_cheap=True)
def layer_norm(x: Spec, w: Spec, bias: Spec | None = None, *, eps: float) -> Spec:
    """Return norm(x) · w, plus the bias in each row."""
    require(len(w.shape) == 1 and x.shape[-1:] == w.shape, "needs one weight for each element of a row")
    require(bias is None or bias == w, "needs a bias like the weight")
    return Spec(x.shape, floats(x, w))


@gradient(layer_norm)
def _(node: Node, dy: Tensor):
    x, w, *bias = node.sources
    dx, dw = layer_norm_back(dy, x, w, eps=node.attrs["eps"])
    return dx, dw, *(sum_to(dy, each.shape) for each in bias)


@op(in_place=((0, 0), (0, 1)))
def layer_norm_back(dy: Spec, x: Spec, w: Spec, *, eps: float) -> tuple[Spec, Spec]:
    """Return the gradients of x and w."""
    dx, dw = rms_norm_back.infer_specs(dy, x, w, eps=eps)
    return dx, dw


@gradient(layer_norm_back)
def _(node: Node, dx: Tensor | None, dw: Tensor | None):
    (_dy, x, _w), eps = node.sources, node.attrs["eps"]
    return weighted_gradients(
        node,
        (dx, dw),
        norm(x, eps=eps),
        rms(sub(x, mean_rows(x)), eps),
        lambda d: norm_back(d, x, eps=eps),
    )


@op(in_place=((0, 0),), is_cheap=True)
def norm(x: Spec, *, eps: float) -> Spec:
    """Return the normed x, with mean 0 and deviation 1."""
    require(len(x.shape) > 0 and x.shape[-1] > 0, "needs rows")
    return Spec(x.shape, floats(x))


@gradient(norm)
def _(node: Node, dy: Tensor):
    return (norm_back(dy, node.sources[0], eps=node.attrs["eps"]),)


@op(in_place=((0, 0), (0, 1)))
def norm_back(dy: Spec, x: Spec, *, eps: float) -> Spec:
    """Return the gradient of x."""
    require(dy.shape == x.shape and len(x.shape) > 0 and x.shape[-1] > 0, "needs dy like x, in rows")
    return Spec(x.shape, floats(dy, x))


@gradient(norm_back)
def _(node: Node, d: Tensor):
    (dy, x), eps = node.sources, node.attrs["eps"]
    normal, size = norm(x, eps=eps), rms(sub(x, mean_rows(x)), eps)
    to_normal = normal_gradient(d, dy, normal, size)
    to_x = add(norm_back(to_normal, x, eps=eps), size_gradient(d, node.outputs[0], normal, size))
    return norm_back(d, x, eps=eps), to_x


# ---- the gradient of a norm's gradient: dx = (u - normal · mean(u normal)) / size, less what is constant --------------


def weighted_gradients(
    node: Node,
    outer: tuple[Tensor | None, Tensor | None],
    normal: Tensor,
    size: Tensor,
    through: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of dy, x and w, given those of dx and dw.

    `through` is the gradient of a normed, unweighted x, which is its own transpose.
    """
    dy, x, w = node.sources
    a, b = gradient_or_zeros(outer[0], x), gradient_or_zeros(outer[1], w)
    to_normal = add(normal_gradient(a, mul(dy, w), normal, size), mul(dy, b))
    to_x = add(through(to_normal), size_gradient(a, node.outputs[0], normal, size))
    return add(mul(through(a), w), mul(normal, b)), to_x, sum_to(mul(through(a), dy), w.shape)


def mean_rows(x: Tensor) -> Tensor:
    """Return the mean over the last axis."""
    return scale(sum_rows(x), by=1 / x.shape[-1])


def rms(x: Tensor, eps: float) -> Tensor:
    """Return the root mean square over the last axis."""
    return sqrt(add_number(mean_rows(sqr(x)), eps))


def normal_gradient(d: Tensor, u: Tensor, normal: Tensor, size: Tensor) -> Tensor:
    """Return the gradient of the normed x, given d, the gradient of dx."""
    both = add(mul(d, mean_rows(mul(u, normal))), mul(u, mean_rows(mul(d, normal))))
    return scale(div(both, size), by=-1.0)


def size_gradient(d: Tensor, dx: Tensor, normal: Tensor, size: Tensor) -> Tensor:
    """Return the gradient of x through its size alone, by which everything was divided."""
    return scale(mul(normal, div(mean_rows(mul(d, dx)), size)), by=-1.0)
