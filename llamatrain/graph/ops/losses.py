"""Losses: sums over rows, each by its weight; or each row's own, for what is made of them before they are summed.

Targets are ids, one a row (negative: none), or rows of a distribution. With a cap c > 0 a logit x of the fused ones is
c tanh(x / c).
"""

from llamatrain.graph.ops.matmul import product
from llamatrain.graph.ops.movement import fill
from llamatrain.graph.ops.shape_rules import SECOND, capped, floats, require
from llamatrain.graph.tensor import F32, F64, I32, Node, QuantizedType, Shape, Spec, Tensor, gradient, op


def _targets(logits: Shape, targets: Spec, weights: Spec) -> None:
    require(len(logits) == 2, "needs rows of logits")
    rows, words = logits
    ids = targets.dtype is I32 and targets.shape == (rows,)
    require(
        ids or targets.shape == (rows, words), "needs an i32 id or a distribution for each row as its target"
    )
    require(weights.shape == (rows,), "needs a weight for each row")


NOT_TRAINED = "it judges, and nothing is trained by it"


@op()
def cross_entropy_loss(logits: Spec, targets: Spec, weights: Spec) -> Spec:
    _targets(logits.shape, targets, weights)
    return Spec((), floats(logits, weights))


@gradient(cross_entropy_loss)
def _(node: Node, dloss: Tensor):
    return cross_entropy_loss_back(dloss, *node.sources), None, None


@op(in_place=((0, 1),), no_gradient=SECOND)
def cross_entropy_loss_back(dloss: Spec, logits: Spec, targets: Spec, weights: Spec) -> Spec:
    require(dloss.shape == (), "needs one number as dloss")
    _targets(logits.shape, targets, weights)
    return Spec(logits.shape, floats(dloss, logits, weights))


@op()
def cross_entropy_rows(logits: Spec, targets: Spec) -> Spec:
    """The loss of each row; nothing where it has no target."""
    require(len(logits.shape) == 2, "needs rows of logits")
    require(
        targets.dtype is I32 and targets.shape == logits.shape[:1],
        "needs an i32 id for each row as its target",
    )
    return Spec(targets.shape, floats(logits))


@gradient(cross_entropy_rows)
def _(node: Node, d: Tensor):
    return cross_entropy_loss_back(fill(shape=(), value=1.0, dtype=d.dtype), *node.sources, d), None


@op(no_gradient=NOT_TRAINED)
def cross_entropy_judged(logits: Spec, targets: Spec, weights: Spec) -> tuple[Spec, ...]:
    """The loss; how many rows of any weight have no larger logit than their target's; and each row's part of the loss."""
    require(targets.dtype is I32, "needs ids as targets")
    return (
        *cross_entropy_loss.infer_specs(logits, targets, weights),
        Spec((), weights.dtype),
        Spec(weights.shape, weights.dtype),
    )


@op(quantized_source=1, rounded_sources=(0,))
def linear_cross_entropy(x: Spec, w: Spec, targets: Spec, weights: Spec, *, cap: float = 0.0) -> Spec:
    """cross_entropy_loss(x wᵀ, targets, weights), chunk by chunk: all the logits are never there."""
    capped(cap)
    require(len(x.shape) == len(w.shape) == 2 and 0 not in w.shape, "needs rows and a matrix")
    logits = product(x, w, x.shape[0], w.shape[0], (x.shape[1], w.shape[1]))
    require(targets.dtype is I32, "needs ids as targets")
    _targets(logits.shape, targets, weights)
    return Spec((), weights.dtype)


@gradient(linear_cross_entropy, selective=True)
def _(node: Node, dloss: Tensor, *, wanted: tuple[bool, ...]):
    _loss, *grads = linear_cross_entropy_back(dloss, *node.sources, dx=wanted[0], dw=wanted[1], **node.attrs)
    dx = grads.pop(0) if wanted[0] else None
    return dx, grads.pop(0) if wanted[1] else None, None, None


@op(value_output=0, quantized_source=2, rounded_sources=(1,), no_gradient=SECOND)
def linear_cross_entropy_back(
    dloss: Spec, x: Spec, w: Spec, targets: Spec, weights: Spec, *, dx: bool, dw: bool, cap: float = 0.0
) -> tuple[Spec, ...]:
    """The loss and its gradients in one pass."""
    require(dx or dw, "no gradient is wanted")
    require(not dw or not isinstance(w.dtype, QuantizedType), "there is no gradient of a quantised weight")
    require(dloss.shape == (), "needs one number as dloss")
    (loss,) = linear_cross_entropy.infer_specs(x, w, targets, weights, cap=cap)
    return (loss, *(Spec(source.shape, loss.dtype) for source, asked in ((x, dx), (w, dw)) if asked))


@op(quantized_source=1, rounded_sources=(0,), no_gradient=NOT_TRAINED)
def linear_cross_entropy_judged(
    x: Spec, w: Spec, targets: Spec, weights: Spec, *, cap: float = 0.0
) -> tuple[Spec, ...]:
    """cross_entropy_judged(x wᵀ, targets, weights), chunk by chunk."""
    loss = linear_cross_entropy.infer_specs(x, w, targets, weights, cap=cap)
    return (*loss, Spec((), weights.dtype), Spec(weights.shape, weights.dtype))


@op(quantized_source=1, rounded_sources=(0,))
def linear_cross_entropy_rows(x: Spec, w: Spec, targets: Spec, *, cap: float = 0.0) -> Spec:
    """cross_entropy_rows(x wᵀ, targets), chunk by chunk."""
    made = Spec(targets.shape, F64 if x.dtype is F64 else F32)
    linear_cross_entropy.infer_specs(x, w, targets, made, cap=cap)
    return made


@gradient(linear_cross_entropy_rows, selective=True)
def _(node: Node, d: Tensor, *, wanted: tuple[bool, ...]):
    made = linear_cross_entropy_rows_back(d, *node.sources, dx=wanted[0], dw=wanted[1], **node.attrs)
    dx, dw = made if all(wanted[:2]) else (made, made)
    return dx if wanted[0] else None, dw if wanted[1] else None, None


@op(quantized_source=2, rounded_sources=(1,), no_gradient=SECOND)
def linear_cross_entropy_rows_back(
    d: Spec, x: Spec, w: Spec, targets: Spec, *, dx: bool, dw: bool, cap: float = 0.0
) -> tuple[Spec, ...]:
    _, *made = linear_cross_entropy_back.infer_specs(
        Spec((), d.dtype), x, w, targets, d, dx=dx, dw=dw, cap=cap
    )
    return tuple(made)
