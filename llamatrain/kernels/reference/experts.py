"""Reference kernels of `graph/ops/experts.py`, in the same order."""

from collections.abc import Iterator

import numpy as np

from llamatrain.kernels.quantized import Blocks
from llamatrain.kernels.reference.registry import from_bf16, kernel, to_bf16


@kernel
def top_k(scores, *, k, groups=1, groups_used=1):
    """Return the columns of the k largest scores of each row, the largest first."""
    ranked = np.where(np.isnan(scores), -np.inf, scores)
    allowed = np.ones(ranked.shape, bool)
    if groups > 1:
        by_group = ranked.reshape(len(ranked), groups, -1)
        totals = np.sort(by_group, axis=-1)[..., -2:].sum(-1)
        best = np.argsort(-totals, axis=-1, kind="stable")[:, :groups_used]
        allowed = np.repeat((best[..., None] == np.arange(groups)).any(1), by_group.shape[-1], axis=-1)
    order = np.argsort(-ranked, axis=-1, kind="stable")
    allowed_first = np.argsort(~np.take_along_axis(allowed, order, -1), axis=-1, kind="stable")
    return np.take_along_axis(order, allowed_first, -1)[:, :k]


@kernel
def take_columns(x, ids):
    """Return elements of each row by their columns."""
    return np.take_along_axis(x, ids, -1)


@kernel
def put_columns(y, ids, *, columns):
    """Return rows of zeros with elements added at their columns."""
    out = np.zeros((len(y), columns), y.dtype)
    np.add.at(out, (np.arange(len(y))[:, None], ids), y)
    return out


@kernel
def normalize_rows(x):
    """Return each row divided by its sum plus 1e-20."""
    return x / row_divisor(x)


@kernel
def normalize_rows_back(dy, x):
    """Return the gradient of x."""
    by = row_divisor(x)
    return (dy - np.sum(dy * x, axis=-1, keepdims=True) / by) / by


def row_divisor(x: np.ndarray) -> np.ndarray:
    """Return what `normalize_rows` divides each row by."""
    return np.sum(x, axis=-1, keepdims=True) + x.dtype.type(1e-20)


@kernel
def sort_choices(ids, *, experts):
    """Return the choices sorted by expert, their experts, and where those of each expert end."""
    order = np.argsort(ids.ravel(), kind="stable").reshape(ids.shape)
    return order, ids.ravel()[order], np.cumsum(np.bincount(ids.ravel(), minlength=experts))


def shares_of_choices(ids: np.ndarray, weights: np.ndarray, experts: int) -> np.ndarray:
    """Return each expert's share of all choices, divided by the weight of all rows; zeros without any."""
    by = np.repeat(weights, ids.shape[1])
    counts = np.bincount(ids.ravel(), by, experts).astype(weights.dtype)
    total = weights.sum()
    return counts / (ids.shape[1] * total * total) if total else np.zeros_like(counts)


@kernel
def balance_loss(probabilities, ids, weights):
    """Return the number of experts times the sum of their shares and mean probabilities."""
    experts = probabilities.shape[1]
    return experts * np.dot(shares_of_choices(ids, weights, experts), weights @ probabilities)


@kernel
def balance_loss_back(dloss, ids, weights, *, experts):
    """Return the gradient of the probabilities."""
    return np.outer(weights, dloss * experts * shares_of_choices(ids, weights, experts))


@kernel
def take_choices(x, order):
    """Return the numbers of choices in sorted order."""
    return x.ravel()[order]


@kernel
def put_choices(y, order):
    """Return sorted numbers in the order of rows."""
    out = np.zeros(y.size, y.dtype)
    out[order.ravel()] = y.ravel()
    return out.reshape(y.shape)


@kernel
def sum_choices(y, order):
    """Return the sum of each row's choices, added in sorted order."""
    out = np.zeros((len(y), y.shape[-1]), y.dtype)
    np.add.at(out, order.ravel() // order.shape[1], y.reshape(-1, y.shape[-1]))
    return out


@kernel
def spread_rows(x, order):
    """Return the row of each sorted choice."""
    return x[order // order.shape[1]]


@kernel
def scale_rows(x, by):
    """Return each row times its number."""
    return x * by.reshape(*x.shape[:-1], 1)


@kernel
def dot_rows(a, b):
    """Return the dot product of each two rows."""
    return (a * b).sum(-1)


# ---- products ----------------------------------------------------------------------------------


def sorted_rows(x: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return a row for each sorted choice."""
    return (x if x.ndim == 3 else spread_rows(x, order)).reshape(-1, x.shape[-1])


def expert_places(ends: np.ndarray) -> Iterator[slice]:
    """Yield the places of each expert's choices."""
    for first, end in zip([0, *ends[:-1]], ends, strict=True):
        yield slice(first, end)


def rounded(x: np.ndarray, half: bool) -> np.ndarray:
    """Return a source of a product, rounded to bfloat16 if the other one is in it."""
    if x.dtype == np.uint16:
        return from_bf16(x)
    return from_bf16(to_bf16(x)) if half else x


def expert_weight(w: np.ndarray | Blocks, expert: int) -> np.ndarray:
    """Return the weight of one expert."""
    return w.decode_rows(expert) if isinstance(w, Blocks) else w[expert]


def multiply(x, w, order, ends, across):
    """Return each choice times the weight of its expert, or times its transpose."""
    half = x.dtype == np.uint16 or w.dtype == np.uint16
    rows = rounded(sorted_rows(x, order), half)
    out = np.zeros((len(rows), w.shape[2 if across else 1]), rows.dtype)
    for expert, places in enumerate(expert_places(ends)):
        if places.stop > places.start:
            weight = rounded(expert_weight(w, expert), half)
            out[places] = rows[places] @ (weight if across else weight.T)
    return out.reshape(*order.shape, -1)


@kernel
def expert_matmul(x, w, order, ends):
    """Return each choice times the weight of its expert, x wᵀ."""
    return multiply(x, w, order, ends, False)


@kernel
def expert_matmul_nn(y, w, order, ends):
    """Return each choice times the weight of its expert, y w."""
    return multiply(y, w, order, ends, True)


@kernel
def expert_out_prod(a, b, order, ends):
    """Return aᵀ b of each expert's choices."""
    half = np.uint16 in (a.dtype, b.dtype)
    left, right = (rounded(sorted_rows(each, order), half) for each in (a, b))
    return np.stack([left[places].T @ right[places] for places in expert_places(ends)])
