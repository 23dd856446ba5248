"""Reference kernels of `graph/ops/losses.py`, in the same order."""

import numpy as np

from llamatrain.kernels.reference.activations import apply_cap
from llamatrain.kernels.reference.registry import kernel, operands
from llamatrain.kernels.reference.softmax import soft_max


def target_distribution(targets, like):
    """Return targets as rows of probabilities; a row without a target is zero."""
    if targets.ndim == 2:
        return targets
    rows = np.zeros_like(like)
    has_target = targets >= 0
    rows[np.flatnonzero(has_target), targets[has_target]] = 1
    return rows


def log_soft_max(x):
    """Return the log of softmax(x)."""
    top = np.max(x, axis=-1, keepdims=True)
    return x - top - np.log(np.sum(np.exp(x - top), axis=-1, keepdims=True))


@kernel
def cross_entropy_rows(logits, targets):
    """Return the loss of each row; 0 for a row without a target."""
    wanted = target_distribution(targets, logits)
    return -np.sum(np.where(wanted == 0, 0, wanted * log_soft_max(logits)), axis=-1)


@kernel
def cross_entropy_loss(logits, targets, weights):
    """Return the sum of the rows' losses, each times its weight."""
    return np.sum(cross_entropy_rows(logits, targets) * weights, dtype=np.float64)


@kernel
def cross_entropy_loss_back(dloss, logits, targets, weights):
    """Return the gradient of the logits."""
    wanted = target_distribution(targets, logits)
    mass = np.sum(wanted, axis=-1, keepdims=True)
    return (soft_max(logits) * mass - wanted) * (weights * dloss)[:, None]


@kernel
def cross_entropy_judged(logits, targets, weights):
    """Return the loss, the number of weighted rows whose target has the largest logit, and each row's loss."""
    judged = np.flatnonzero((targets >= 0) & (weights != 0))
    right = logits[judged, targets[judged]] >= np.max(logits[judged], axis=-1)
    each = np.where(weights == 0, 0, cross_entropy_rows(logits, targets) * weights)
    return cross_entropy_loss(logits, targets, weights), np.count_nonzero(right), each


@kernel
def linear_cross_entropy(x, w, targets, weights, *, cap=0.0):
    """Return cross_entropy_loss(x wᵀ, targets, weights) in chunks; the logits never exist all at once."""
    x, w = operands(x, w)
    return cross_entropy_loss(apply_cap(x @ w.T, cap), targets, weights)


@kernel
def linear_cross_entropy_back(dloss, x, w, targets, weights, *, dx, dw, cap=0.0):
    """Return the loss and its gradients in one pass."""
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
    """Return cross_entropy_judged(x wᵀ, targets, weights) in chunks."""
    x, w = operands(x, w)
    return cross_entropy_judged(apply_cap(x @ w.T, cap), targets, weights)


@kernel
def linear_cross_entropy_rows(x, w, targets, *, cap=0.0):
    """Return cross_entropy_rows(x wᵀ, targets) in chunks."""
    x, w = operands(x, w)
    return cross_entropy_rows(apply_cap(x @ w.T, cap), targets)


@kernel
def linear_cross_entropy_rows_back(d, x, w, targets, **how):
    """Return the gradients of x and w, given the gradient of each row's loss."""
    _, *grads = linear_cross_entropy_back(d.dtype.type(1), x, w, targets, d, **how)
    return tuple(grads)
