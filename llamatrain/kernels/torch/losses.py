"""Torch kernels of losses. The fused ones compute some rows of logits at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor

from llamatrain.graph.op_cost import head_operands
from llamatrain.graph.tensor import BF16, Node
from llamatrain.kernels.quantized import Blocks
from llamatrain.kernels.torch.elementwise import Outs, apply_cap, several_results
from llamatrain.kernels.torch.fast import run_fast
from llamatrain.kernels.torch.matmul import add_product, multiply, operand_bytes, operands
from llamatrain.kernels.torch.movement import wide
from llamatrain.kernels.torch.registry import kernel, writing_kernel

LOGITS_AT_ONCE = {"cpu": 1 << 22, "other": 1 << 26}  # elements


def chunk_rows(words: int, device: str) -> int:
    """Return how many rows of logits are computed at a time."""
    return max(1, LOGITS_AT_ONCE.get(device, LOGITS_AT_ONCE["other"]) // words)


def log_soft_max(logits: Tensor) -> Tensor:
    """Return the log of the softmax."""
    return torch.log_softmax(logits, dim=-1)


def row_losses(logs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each row from its log probabilities; 0 for a row without a target."""
    if targets.dim() == 2:
        return -torch.where(targets == 0, 0, targets * logs).sum(dim=-1)
    picked = logs.gather(1, targets.clamp(min=0).long()[:, None])[:, 0]
    return torch.where(targets >= 0, -picked, 0)


def subtract_targets(p: Tensor, targets: Tensor) -> Tensor:
    """Subtract the targets from probabilities, and set rows without a target to 0, in place."""
    if targets.dim() == 2:
        return p.mul_(targets.sum(dim=-1, keepdim=True)).sub_(targets)
    has_target = (targets >= 0).to(p.dtype)[:, None]
    places = targets.clamp(min=0).long()[:, None]
    p.scatter_(1, places, p.gather(1, places) - 1)
    return p.mul_(has_target)


def weighted_sum(losses: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of losses, each times its weight."""
    return torch.sum((losses * weights).to(wide(losses)))


def count_right(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Return the number of weighted rows whose target has the largest logit."""
    picked = logits.gather(1, targets.clamp(min=0).long()[:, None])[:, 0]
    return ((picked >= logits.amax(dim=-1)) & (targets >= 0) & (weights != 0)).sum()


@kernel(several_results)
def cross_entropy_rows(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each row."""
    return row_losses(log_soft_max(logits), targets)


def logit_bytes(node: Node) -> int:
    """Return the bytes of two copies of the logits, and of a few numbers for each row."""
    logits = max(node.sources, key=lambda source: source.size)
    return 3 * logits.nbytes


@kernel(logit_bytes)
def cross_entropy_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of the rows' losses, each times its weight."""
    return weighted_sum(cross_entropy_rows(logits, targets), weights)


@kernel(logit_bytes)
def cross_entropy_loss_back(dloss: Tensor, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Return the gradient of the logits."""
    p = torch.softmax(logits, dim=-1)
    return subtract_targets(p, targets).mul_((weights * dloss)[:, None])


@kernel(logit_bytes)
def cross_entropy_judged(logits: Tensor, targets: Tensor, weights: Tensor) -> Outs:
    """Return the loss, the number of right predictions, and each row's loss."""
    losses = cross_entropy_rows(logits, targets)
    each = torch.where(weights == 0, 0, losses * weights)
    return weighted_sum(losses, weights), count_right(logits, targets, weights), each


# ---- fused with the product that makes the logits ----------------------------------------------


def fused_bytes(node: Node) -> int:
    """Return the bytes of converted sources, and of what some rows of logits need."""
    x, w = head_operands(node)
    at_once = min(x.shape[0] * w.shape[0], LOGITS_AT_ONCE["other"])
    back = node.op.name.endswith("_back")
    return operand_bytes(node) + at_once * (4 + 4 + (2 if back and BF16 in (x.dtype, w.dtype) else 0))


def logits_of(x: Tensor, w: Tensor, cap: float) -> Tensor:
    """Return the logits of some rows in full precision."""
    dtype = torch.float32 if x.dtype is torch.bfloat16 else x.dtype
    logits = torch.empty((x.shape[0], w.shape[0]), dtype=dtype, device=x.device)
    multiply(x, w.mT, logits)
    return apply_cap(logits, cap)


def chunks(x: Tensor, w: Tensor) -> Iterator[slice]:
    """Yield ranges of rows whose logits are computed at a time."""
    step = chunk_rows(w.shape[0], x.device.type)
    for first in range(0, x.shape[0], step):
        yield slice(first, first + step)


@kernel(fused_bytes)
def linear_cross_entropy(
    x: Tensor, w: Tensor | Blocks, targets: Tensor, weights: Tensor, *, cap: float = 0.0
) -> Tensor:
    """Return cross_entropy_loss(x wᵀ, targets, weights)."""
    return weighted_sum(linear_cross_entropy_rows(x, w, targets, cap=cap), weights)


@kernel(fused_bytes)
def linear_cross_entropy_rows(x: Tensor, w: Tensor | Blocks, targets: Tensor, *, cap: float = 0.0) -> Tensor:
    """Return cross_entropy_rows(x wᵀ, targets)."""
    x, w = operands(x, w)
    parts = (row_losses(log_soft_max(logits_of(x[rows], w, cap)), targets[rows]) for rows in chunks(x, w))
    return torch.cat([*parts])


@kernel(fused_bytes)
def linear_cross_entropy_judged(
    x: Tensor, w: Tensor | Blocks, targets: Tensor, weights: Tensor, *, cap: float = 0.0
) -> Outs:
    """Return cross_entropy_judged(x wᵀ, targets, weights)."""
    x, w = operands(x, w)
    losses, right = [], []
    for rows in chunks(x, w):
        logits = logits_of(x[rows], w, cap)
        right.append(count_right(logits, targets[rows], weights[rows]))
        losses.append(row_losses(log_soft_max(logits), targets[rows]))
    whole = torch.cat(losses)
    each = torch.where(weights == 0, 0, whole * weights)
    return weighted_sum(whole, weights), torch.stack(right).sum(), each


@writing_kernel(fused_bytes)
def linear_cross_entropy_back(
    dloss: Tensor,
    x: Tensor,
    w: Tensor | Blocks,
    targets: Tensor,
    weights: Tensor,
    *,
    dx: bool,
    dw: bool,
    cap: float = 0.0,
    out: Outs,
) -> None:
    """Write the loss and its gradients."""
    loss, *grads = out
    x, w = operands(x, w)
    losses = []
    for number, rows in enumerate(chunks(x, w)):
        logits = logits_of(x[rows], w, cap)
        loss_of_rows, d = logit_gradients(logits, targets[rows], weights[rows], dloss, x.dtype)
        losses.append(weighted_sum(loss_of_rows, weights[rows]))
        if cap:
            d = (logits.div_(cap).square_().neg_().add_(1)).mul_(d).to(x.dtype)
        write_gradients(d, x[rows], w, rows, [*grads], (dx, dw), number > 0)
    loss.copy_(torch.stack(losses).sum())


def logit_gradients(
    logits: Tensor, targets: Tensor, weights: Tensor, dloss: Tensor, dtype: torch.dtype
) -> Outs:
    """Return the losses of rows, and the gradients of their logits in a type."""
    losses = torch.empty(len(logits), dtype=logits.dtype, device=logits.device)
    d = torch.empty_like(logits, dtype=dtype)
    if run_fast("cross_entropy", logits, targets, weights, dloss, losses, d):
        return losses, d
    logs = log_soft_max(logits)
    losses = row_losses(logs, targets)
    d.copy_(subtract_targets(logs.exp_(), targets).mul_((weights * dloss)[:, None]))
    return losses, d


def write_gradients(
    d: Tensor, x: Tensor, w: Tensor, rows: slice, grads: list[Tensor], wanted: tuple[bool, bool], more: bool
) -> None:
    """Write the gradients of some rows and, if `more`, add to that of the weight."""
    if wanted[0]:
        multiply(d, w, grads.pop(0)[rows])
    if wanted[1] and more:
        add_product(d.mT, x, grads[0], grads[0])
    elif wanted[1]:
        multiply(d.mT, x, grads[0])


@writing_kernel(fused_bytes)
def linear_cross_entropy_rows_back(
    d: Tensor,
    x: Tensor,
    w: Tensor | Blocks,
    targets: Tensor,
    *,
    dx: bool,
    dw: bool,
    cap: float = 0.0,
    out: Outs,
) -> None:
    """Write the gradients of x and w, given the gradient of each row's loss."""
    one, unused = (
        torch.ones((), dtype=d.dtype, device=d.device),
        torch.empty((), dtype=d.dtype, device=d.device),
    )
    linear_cross_entropy_back(one, x, w, targets, d, dx=dx, dw=dw, cap=cap, out=(unused, *out))
