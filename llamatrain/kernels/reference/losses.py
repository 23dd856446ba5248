"""What the ops of `graph/ops/losses.py` do to arrays, in the same order."""

import numpy as np

from llamatrain.kernels.reference.activations import apply_cap
from llamatrain.kernels.reference.registry import kernel, operands
from llamatrain.kernels.reference.softmax import soft_max


def target_distribution(targets, like):
    """Rows of probabilities; a row of zeros where there is no target."""
    if targets.ndim == 2:
        return targets
    rows = np.zeros_like(like)
    has_target = targets >= 0
    rows[np.flatnonzero(has_target), targets[has_target]] = 1
    return rows


def log_soft_max(x):
    top = np.max(x, axis=-1, keepdims=True)
    return x - top - np.log(np.sum(np.exp(x - top), axis=-1, keepdims=True))


@kernel
def cross_entropy_rows(logits, targets):
    wanted = target_distribution(targets, logits)
    return -np.sum(np.where(wanted == 0, 0, wanted * log_soft_max(logits)), axis=-1)


@kernel
def cross_entropy_loss(logits, targets, weights):
    return np.sum(cross_entropy_rows(logits, targets) * weights, dtype=np.float64)


@kernel
def cross_entropy_loss_back(dloss, logits, targets, weights):
    wanted = target_distribution(targets, logits)
    mass = np.sum(wanted, axis=-1, keepdims=True)
    return (soft_max(logits) * mass - wanted) * (weights * dloss)[:, None]


@kernel
def cross_entropy_judged(logits, targets, weights):
    judged = np.flatnonzero((targets >= 0) & (weights != 0))
    right = logits[judged, targets[judged]] >= np.max(logits[judged], axis=-1)
    each = np.where(weights == 0, 0, cross_entropy_rows(logits, targets) * weights)
    return cross_entropy_loss(logits, targets, weights), np.count_nonzero(right), each


@kernel
def linear_cross_entropy(x, w, targets, weights, *, cap=0.0):
    x, w = operands(x, w)
    return cross_entropy_loss(apply_cap(x @ w.T, cap), targets, weights)


@kernel
def linear_cross_entropy_back(dloss, x, w, targets, weights, *, dx, dw, cap=0.0):
    a, b = operands(x, w)
    logits = apply_cap(a @ b.T, cap)
    d = cross_entropy_loss_back(dloss, logits, targets, weights)
    if cap:
        d *= 1 - np.square(logits / logits.dtype.type(cap))
    if x.dtype == np.uint16 or w.dtype == np.uint16:
        d, _ = operands(d, np.zeros(0, np.uint16))
    grads = (d @ b if dx else None, d.T @ a if dw else None)
    return (cross_entropy_loss(logits, targets, weights), *(grad for grad in grads if grad is not None))


@kernel
def linear_cross_entropy_judged(x, w, targets, weights, *, cap=0.0):
    x, w = operands(x, w)
    return cross_entropy_judged(apply_cap(x @ w.T, cap), targets, weights)


@kernel
def linear_cross_entropy_rows(x, w, targets, *, cap=0.0):
    x, w = operands(x, w)
    return cross_entropy_rows(apply_cap(x @ w.T, cap), targets)


@kernel
def linear_cross_entropy_rows_back(d, x, w, targets, **how):
    _, *grads = linear_cross_entropy_back(d.dtype.type(1), x, w, targets, d, **how)
    return tuple(grads)
