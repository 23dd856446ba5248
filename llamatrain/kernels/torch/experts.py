"""Torch kernels of mixtures of experts.

A product asks the device how many choices each expert has, so it cannot be recorded.
"""

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from llamatrain.graph.tensor import BF16, Node, QuantizedType
from llamatrain.kernels.quantized import Blocks
from llamatrain.kernels.torch.dequantize import decode_bytes
from llamatrain.kernels.torch.elementwise import Outs
from llamatrain.kernels.torch.matmul import multiply, operands
from llamatrain.kernels.torch.registry import kernel, result_bytes, writing_kernel

# ---- which experts ---------------------------------------------------------


@kernel(lambda node: 40 * node.sources[0].size)
def top_k(scores: Tensor, *, k: int, groups: int = 1, groups_used: int = 1) -> Tensor:
    """Return the columns of the k largest scores of each row, the largest first."""
    ranked = torch.where(scores.isnan(), -torch.inf, scores)
    order = (-ranked).argsort(dim=-1, stable=True)
    if groups > 1:
        totals = ranked.unflatten(-1, (groups, -1)).topk(2, dim=-1).values.sum(-1)
        best = (-totals).argsort(dim=-1, stable=True)[:, :groups_used]
        group = order // (scores.shape[1] // groups)
        allowed = (group[..., None] == best[:, None]).any(-1)
        order = order.gather(-1, (~allowed).byte().argsort(dim=-1, stable=True))
    return order[:, :k]


@kernel(lambda node: result_bytes(node) + 8 * node.sources[1].size)
def take_columns(x: Tensor, ids: Tensor) -> Tensor:
    """Return elements of each row by their columns."""
    return x.gather(-1, ids.long())


@kernel(lambda node: result_bytes(node) + 8 * node.sources[1].size)
def put_columns(y: Tensor, ids: Tensor, *, columns: int) -> Tensor:
    """Return rows of zeros with elements added at their columns."""
    return y.new_zeros(len(y), columns).scatter_add_(-1, ids.long(), y)


def shares_of_choices(ids: Tensor, weights: Tensor, experts: int) -> Tensor:
    """Return each expert's share of all choices, divided by the weight of all rows; zeros without any."""
    by = weights.repeat_interleave(ids.shape[1])
    counts, total = weights.new_zeros(experts).scatter_add_(0, ids.flatten().long(), by), weights.sum()
    return torch.where(total != 0, counts / (ids.shape[1] * total * total), 0)


@kernel(lambda node: 16 * node.sources[1].size)
def balance_loss(probabilities: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return the number of experts times the sum of their shares and mean probabilities."""
    experts = probabilities.shape[1]
    return experts * shares_of_choices(ids, weights, experts) @ (weights @ probabilities)


@kernel(lambda node: result_bytes(node) + 16 * node.sources[1].size)
def balance_loss_back(dloss: Tensor, ids: Tensor, weights: Tensor, *, experts: int) -> Tensor:
    """Return the gradient of the probabilities."""
    return weights.outer(dloss * experts * shares_of_choices(ids, weights, experts))


@kernel(result_bytes)
def normalize_rows(x: Tensor) -> Tensor:
    """Return each row divided by its sum plus 1e-20."""
    return x / (x.sum(-1, keepdim=True) + 1e-20)


@kernel(lambda node: 3 * result_bytes(node))
def normalize_rows_back(dy: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of x."""
    by = x.sum(-1, keepdim=True) + 1e-20
    return (dy - (dy * x).sum(-1, keepdim=True) / by) / by


# ---- the order of choices --------------------------------------------------


@kernel(lambda node: 40 * node.sources[0].size)
def sort_choices(ids: Tensor, *, experts: int) -> tuple[Tensor, ...]:
    """Return the choices sorted by expert, their experts, and where those of each expert end."""
    expert, order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(expert, torch.arange(experts, device=ids.device, dtype=ids.dtype), right=True)
    return order.view(ids.shape), expert.view(ids.shape), ends


@kernel(lambda node: result_bytes(node) + 8 * node.sources[1].size)
def take_choices(x: Tensor, order: Tensor) -> Tensor:
    """Return the numbers of choices in sorted order."""
    return x.flatten()[order.long()]


@kernel(lambda node: result_bytes(node) + 8 * node.sources[1].size)
def put_choices(y: Tensor, order: Tensor) -> Tensor:
    """Return sorted numbers in the order of rows."""
    return torch.empty_like(y).view(-1).scatter_(0, order.flatten().long(), y.flatten()).view(y.shape)


@kernel(lambda node: result_bytes(node) + node.sources[0].nbytes + 16 * node.sources[1].size)
def sum_choices(y: Tensor, order: Tensor) -> Tensor:
    """Return the sum of each row's choices."""
    return y.flatten(0, 1)[order.flatten().argsort()].view(y.shape).sum(1)


@kernel(lambda node: result_bytes(node) + 16 * node.sources[1].size)
def spread_rows(x: Tensor, order: Tensor) -> Tensor:
    """Return the row of each sorted choice."""
    return x[order.long() // order.shape[1]]


# ---- a number for each row -------------------------------------------------


@writing_kernel()
def scale_rows(x: Tensor, by: Tensor, *, out: Outs) -> None:
    """Write each row times its number."""
    torch.mul(x, by.reshape(*x.shape[:-1], 1), out=out[0])


@kernel(lambda node: result_bytes(node) + node.sources[0].nbytes)
def dot_rows(a: Tensor, b: Tensor) -> Tensor:
    """Return the dot product of each two rows."""
    return (a * b).sum(-1)


# ---- products --------------------------------------------------------------


def product_bytes(node: Node) -> int:
    """Return the bytes of sorted rows, and of the weight of one expert if it is converted."""
    (choices, half), total = (node.sources[2].size, BF16 in {each.dtype for each in node.sources[:2]}), 0
    for source in node.sources[:2]:
        if isinstance(source.dtype, QuantizedType):
            total += (2 if half else 4) * prod(source.shape[1:])
            total += decode_bytes(source.dtype.kind, source.shape[1], source.shape[2])
        else:
            total += 6 * choices * source.shape[-1]
    return total + result_bytes(node)


def sorted_rows(x: Tensor, order: Tensor) -> Tensor:
    """Return a row for each sorted choice."""
    return x.flatten(0, 1) if x.dim() == 3 else spread_rows(x, order).flatten(0, 1)


def expert_places(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield the experts that have choices, and the places of these."""
    first = 0
    for expert, end in enumerate(ends.tolist()):
        if end > first:
            yield expert, slice(first, end)
        first = end


def expert_weight(w: Tensor | Blocks, expert: int) -> Tensor | Blocks:
    """Return the weight of one expert."""
    return Blocks(w.kind, w.shape[1:], w.raw[expert]) if isinstance(w, Blocks) else w[expert]


@writing_kernel(product_bytes, is_recordable=False)
def expert_matmul(x: Tensor, w: Tensor | Blocks, order: Tensor, ends: Tensor, *, out: Outs) -> None:
    """Write each choice times the weight of its expert, x wᵀ."""
    rows, results = sorted_rows(x, order), out[0].flatten(0, 1)
    for expert, places in expert_places(ends):
        a, b = operands(rows[places], expert_weight(w, expert))
        multiply(a, b.mT, results[places])


@writing_kernel(product_bytes, is_recordable=False)
def expert_matmul_nn(y: Tensor, w: Tensor | Blocks, order: Tensor, ends: Tensor, *, out: Outs) -> None:
    """Write each choice times the weight of its expert, y w."""
    rows, results = sorted_rows(y, order), out[0].flatten(0, 1)
    for expert, places in expert_places(ends):
        a, b = operands(rows[places], expert_weight(w, expert))
        multiply(a, b, results[places])


@writing_kernel(product_bytes, is_recordable=False)
def expert_out_prod(a: Tensor, b: Tensor, order: Tensor, ends: Tensor, *, out: Outs) -> None:
    """Write aᵀ b of each expert's choices."""
    left, right = operands(sorted_rows(a, order), sorted_rows(b, order))
    out[0].zero_()
    for expert, places in expert_places(ends):
        multiply(left[places].mT, right[places], out[0][expert])
