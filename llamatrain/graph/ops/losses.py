"""Losses: weighted sums over rows, or the loss of each row for further computation.

Targets are ids, one for each row (negative: none), or rows of a distribution. With a cap c > 0, a logit x of
the fused ops becomes c tanh(x / c).
"""

from llamatrain.graph.ops.matmul import product
from llamatrain.graph.ops.movement import fill
from llamatrain.graph.ops.shape_rules import SECOND, capped, floats, require
from llamatrain.graph.tensor import F32, F64, I32, Node, Shape, Spec, Tensor, gradient, op


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
    """Return the sum of the rows' losses, each times its weight."""
    _targets(logits.shape, targets, weights)
    return Spec((), floats(logits, weights))


@gradient(cross_entropy_loss)
def _(node: Node, dloss: Tensor):
    return cross_entropy_loss_back(dloss, *node.sources), None, None


@op(in_place=((0, 1),), no_gradient=SECOND)
def cross_entropy_loss_back(dloss: Spec, logits: Spec, targets: Spec, weights: Spec) -> Spec:
    """Return the gradient of the logits."""
    require(dloss.shape == (), "needs one number as dloss")
    _targets(logits.shape, targets, weights)
    return Spec(logits.shape, floats(dloss, logits, weights))


@op()
def cross_entropy_rows(logits: Spec, targets: Spec) -> Spec:
    """Return the loss of each row; 0 for a row without a target."""
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
    """Return the loss, the number of weighted rows whose target has the largest logit, and each row's loss."""
    require(targets.dtype is I32, "needs ids as targets")
    return (
        *cross_entropy_loss.infer_specs(logits, targets, weights),
        Spec((), weights.dtype),
        Spec(weights.shape, weights.dtype),
    )


@op(quantized_source=1, rounded_sources=(0,))
def linear_cross_entropy(x: Spec, w: Spec, targets: Spec, weights: Spec, *, cap: float = 0.0) -> Spec:
    """Return cross_entropy_loss(x wᵀ, targets, weights) in chunks; the logits never exist all at once."""
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
    """Return the loss and its gradients in one pass."""
    require(dx or dw, "no gradient is wanted")
    require(dloss.shape == (), "needs one number as dloss")
    (loss,) = linear_cross_entropy.infer_specs(x, w, targets, weights, cap=cap)
    return (loss, *(Spec(source.shape, loss.dtype) for source, asked in ((x, dx), (w, dw)) if asked))


@op(quantized_source=1, rounded_sources=(0,), no_gradient=NOT_TRAINED)
def linear_cross_entropy_judged(
    x: Spec, w: Spec, targets: Spec, weights: Spec, *, cap: float = 0.0
) -> tuple[Spec, ...]:
    """Return cross_entropy_judged(x wᵀ, targets, weights) in chunks."""
    loss = linear_cross_entropy.infer_specs(x, w, targets, weights, cap=cap)
    return (*loss, Spec((), weights.dtype), Spec(weights.shape, weights.dtype))


@op(quantized_source=1, rounded_sources=(0,))
def linear_cross_entropy_rows(x: Spec, w: Spec, targets: Spec, *, cap: float = 0.0) -> Spec:
    """Return cross_entropy_rows(x wᵀ, targets) in chunks."""
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
    """Return the gradients of x and w, given the gradient of each row's loss."""
    _, *made = linear_cross_entropy_back.infer_specs(
        Spec((), d.dtype), x, w, targets, d, dx=dx, dw=dw, cap=cap
    )
    return tuple(made)
