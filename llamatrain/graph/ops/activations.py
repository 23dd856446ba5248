"""Elementwise functions between products; most are for graphs that users build themselves."""

import math
from typing import Any

from llamatrain.graph.ops.arithmetic import add, mul, scale, sqr
from llamatrain.graph.ops.movement import fill
from llamatrain.graph.ops.shape_rules import capped, floats, require
from llamatrain.graph.tensor import Node, Spec, Tensor, gradient, op

# gelu(x) = x · sigmoid(v(x)) with v(x) = A x + B x³: the form with the tanh, in which models are trained
A = 2 * math.sqrt(2 / math.pi)
B = A * 0.044715


@op(in_place=((0, 0),))
def step(x: Spec) -> Spec:
    """Return 1 where x is above 0, else 0."""
    return Spec(x.shape, floats(x))


@gradient(step)
def _(node: Node, dy: Tensor):
    return (fill(shape=dy.shape, value=0.0, dtype=dy.dtype),)


@op(in_place=((0, 0),), is_cheap=True)
def relu(x: Spec) -> Spec:
    """Return max(x, 0)."""
    return Spec(x.shape, floats(x))


@gradient(relu)
def _(node: Node, dy: Tensor):
    return (mul(dy, step(node.sources[0])),)


@op(in_place=((0, 0),), is_cheap=True)
def relu_sqr(x: Spec) -> Spec:
    """Return max(x, 0)²."""
    return Spec(x.shape, floats(x))


@gradient(relu_sqr)
def _(node: Node, dy: Tensor):
    return (relu_sqr_back(dy, node.sources[0]),)


@op(in_place=((0, 0), (0, 1)))
def relu_sqr_back(dy: Spec, x: Spec) -> Spec:
    """Return dy times 2 max(x, 0)."""
    require(dy.shape == x.shape, "needs dy like x")
    return Spec(x.shape, floats(dy, x))


@gradient(relu_sqr_back)
def _(node: Node, d: Tensor):
    dy, x = node.sources
    return relu_sqr_back(d, x), scale(mul(mul(d, dy), step(x)), by=2.0)


@op(in_place=((0, 0),))
def sigmoid(x: Spec) -> Spec:
    """Return 1 / (1 + exp(-x))."""
    return Spec(x.shape, floats(x))


@gradient(sigmoid)
def _(node: Node, dy: Tensor):
    return (mul(dy, sigmoid_slope(node.outputs[0])),)


@op(in_place=((0, 0),))
def exp(x: Spec) -> Spec:
    """Return e to the power of x."""
    return Spec(x.shape, floats(x))


@gradient(exp)
def _(node: Node, dy: Tensor):
    return (mul(dy, node.outputs[0]),)


@op(in_place=((0, 0),), is_cheap=True)
def gelu(x: Spec) -> Spec:
    """Return x · sigmoid(A x + B x³)."""
    return Spec(x.shape, floats(x))


@gradient(gelu)
def _(node: Node, dy: Tensor):
    return (gelu_back(dy, node.sources[0]),)


@op(in_place=((0, 0), (0, 1)))
def gelu_back(dy: Spec, x: Spec) -> Spec:
    """Return dy times the derivative of gelu at x."""
    require(dy.shape == x.shape, "needs dy like x")
    return Spec(x.shape, floats(dy, x))


@gradient(gelu_back)
def _(node: Node, d: Tensor):
    dy, x = node.sources
    return gelu_back(d, x), mul(mul(d, dy), gelu_second_derivative(x))


def gelu_second_derivative(x: Tensor) -> Tensor:
    """Return the second derivative of gelu: with s = sigmoid(v), s(1 - s) · (2v' + x (v'' + (1 - 2s) v'²))."""
    inner = add_number(scale(sqr(x), by=3 * B), A)
    s = sigmoid(mul(x, add_number(scale(sqr(x), by=B), A)))
    bent = add(scale(x, by=6 * B), mul(add_number(scale(s, by=-2.0), 1.0), sqr(inner)))
    return mul(sigmoid_slope(s), add(scale(inner, by=2.0), mul(x, bent)))


@op(in_place=((0, 0),), is_cheap=True)
def xielu(x: Spec, *, positive: float, negative: float, beta: float, eps: float) -> Spec:
    """Return positive x² + beta x above 0, and negative (exp(min(x, eps)) - 1 - x) + beta x elsewhere."""
    return Spec(x.shape, floats(x))


@gradient(xielu)
def _(node: Node, dy: Tensor):
    return (xielu_back(dy, node.sources[0], **node.attrs),)


@op(in_place=((0, 0), (0, 1)))
def xielu_back(dy: Spec, x: Spec, *, positive: float, negative: float, beta: float, eps: float) -> Spec:
    """Return dy times the derivative of xielu at x."""
    require(dy.shape == x.shape, "needs dy like x")
    return Spec(x.shape, floats(dy, x))


@gradient(xielu_back)
def _(node: Node, d: Tensor):
    dy, x = node.sources
    return xielu_back(d, x, **node.attrs), mul(mul(d, dy), xielu_second_derivative(x, **node.attrs))


def xielu_second_derivative(x: Tensor, **how: Any) -> Tensor:
    """Return 2 positive above 0. Elsewhere it is the derivative, less its limit far below 0."""
    slope = xielu_back(fill(shape=x.shape, value=1.0, dtype=x.dtype), x, **how)
    above = step(x)
    below = mul(add_number(scale(above, by=-1.0), 1.0), add_number(slope, how["negative"] - how["beta"]))
    return add(scale(above, by=2 * how["positive"]), below)


@op(in_place=((0, 0),))
def softcap(x: Spec, *, cap: float) -> Spec:
    """Return cap tanh(x / cap): small numbers hardly change, and none exceeds cap."""
    capped(cap)
    require(cap > 0, "needs a cap")
    return Spec(x.shape, floats(x))


@gradient(softcap)
def _(node: Node, dy: Tensor):
    return (softcap_back(dy, node.outputs[0], **node.attrs),)


@op(in_place=((0, 0), (0, 1)))
def softcap_back(dy: Spec, y: Spec, *, cap: float) -> Spec:
    """Return dy (1 - (y / cap)²), where y is the output of softcap."""
    require(dy.shape == y.shape, "needs dy like y")
    return softcap.infer_specs(Spec(y.shape, floats(dy, y)), cap=cap)[0]


@gradient(softcap_back)
def _(node: Node, d: Tensor):
    (dy, y), cap = node.sources, node.attrs["cap"]
    return softcap_back(d, y, cap=cap), scale(mul(mul(d, dy), y), by=-2 / cap**2)


def sigmoid_slope(s: Tensor) -> Tensor:
    """Return the derivative of the sigmoid by its value: s (1 - s)."""
    return mul(s, add_number(scale(s, by=-1.0), 1.0))


def add_number(x: Tensor, number: float) -> Tensor:
    """Return x plus a constant."""
    return add(x, fill(shape=(), value=number, dtype=x.dtype))
