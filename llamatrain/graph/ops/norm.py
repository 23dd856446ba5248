"""Root mean square norm: y = x / rms(x) · w over the last axis, rms(x) = sqrt(mean(x²) + eps)."""

from llamatrain.graph.ops.rules import SECOND, floats, require
from llamatrain.graph.tensor import Node, Spec, Tensor, gradient, op


@op(in_place=((0, 0),), light=True)
def rms_norm(x: Spec, w: Spec, *, eps: float) -> Spec:
    require(len(w.shape) == 1 and x.shape[-1:] == w.shape, "needs one weight for each element of a row")
    return Spec(x.shape, floats(x, w))


@gradient(rms_norm)
def _(node: Node, dy: Tensor):
    x, w = node.sources
    return rms_norm_back(dy, x, w, eps=node.attrs["eps"])


@op(in_place=((0, 0), (0, 1)), no_gradient=SECOND)
def rms_norm_back(dy: Spec, x: Spec, w: Spec, *, eps: float) -> tuple[Spec, Spec]:
    require(dy.shape == x.shape and x.shape[-1:] == w.shape, "needs dy like x, and one weight for each element of a row")
    return Spec(x.shape, floats(dy, x, w)), w
