"""Torch kernels of `graph/ops/optimizer.py`, in the same order.

The kernels that change a weight or its moments find them in `out`. They go through them piece by piece, so that
they need little memory besides.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from llamatrain.graph.tensor import Node
from llamatrain.kernels.torch.fast import run_fast
from llamatrain.kernels.torch.registry import kernel, result_bytes, writing_kernel

PIECE = 1 << 24  # numbers


def wide_type(x: Tensor) -> torch.dtype:
    """Return float64, or the type of x where the device has no float64."""
    return x.dtype if x.device.type == "mps" else torch.float64


@kernel(lambda node: 3 * result_bytes(node) + 64 * node.sources[1].size)  # sums of parts, and sorted ids
def opt_rows(dy: Tensor, ids: Tensor, *, rows: int) -> tuple[Tensor, Tensor]:
    """Return get_rows_back without its zero rows, and for each row of the weight its index or -1."""
    ids = ids.flatten().long()
    count = len(ids)
    numbers = torch.arange(count, dtype=torch.int32, device=ids.device)
    places = numbers.new_full((rows,), count).scatter_reduce_(0, ids, numbers, "amin")
    found = torch.ops.aten.embedding_dense_backward(
        dy.reshape(count, dy.shape[-1]), places[ids].long(), count, -1, False
    )
    return found.view(dy.shape), places.masked_fill_(places == count, -1)


def with_zeros(g: Tensor) -> Tensor:
    """Return the rows of a gradient and a row of zeros, which has number -1."""
    rows = g.flatten(0, -2)
    return torch.cat([rows, rows.new_zeros(1, rows.shape[1])])


@kernel(lambda node: 12 * node.sources[0].size + 16 * node.sources[1].size)
def opt_sum_sqr(g: Tensor, places: Tensor) -> Tensor:
    """Return sum_sqr of the full gradient whose rows these are."""
    squares = with_zeros(g).to(wide_type(g)).square_().sum(-1)
    return squares[places].sum().to(g.dtype)


def pieces(places: Tensor | None, g: Tensor, *changed: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield a gradient piece by piece in its weight's shape, each with that part of what changes."""
    if places is None:
        yield from zip(*(x.view(-1).split(PIECE) for x in (g, *changed)), strict=True)
        return
    rows, step = with_zeros(g), max(1, PIECE // max(1, g.shape[-1]))
    for part, *others in zip(*(x.split(step) for x in (places, *changed)), strict=True):
        yield rows[part], *others


def piece_bytes(node: Node, g: int, places: int) -> int:
    """Return the bytes of what `pieces` makes, by the numbers of the sources."""
    if len(node.sources) <= places:
        return 0
    return one_piece(node) + 2 * node.sources[g].nbytes


def one_piece(node: Node) -> int:
    """Return the bytes of a piece of the weight."""
    return node.outputs[0].dtype.size * min(PIECE, node.outputs[0].size)


@writing_kernel(lambda node: one_piece(node) + piece_bytes(node, 3, 6))
def opt_step_adamw(
    w: Tensor,
    m: Tensor,
    v: Tensor,
    g: Tensor,
    schedule: Tensor,
    factor: Tensor,
    places: Tensor | None = None,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    out: tuple[Tensor, ...],
) -> None:
    """Update a weight and its moments as torch.optim.AdamW does."""
    settings = {"beta1": beta1, "beta2": beta2, "eps": eps, "decay": decay}
    if places is None and run_fast("adamw", *out, g, schedule, factor, **settings):
        return
    rate, bias1, bias2 = schedule.unbind()
    kept, scale, far = 1 - rate * decay, rate / bias1 * bias2.sqrt(), bias2.sqrt() * eps
    for dw, w, m, v in pieces(places, g, *out):
        dw = dw * factor
        m.mul_(beta1).add_(dw, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(dw, dw, value=1 - beta2)
        torch.sqrt(v, out=dw).add_(far)
        torch.div(m, dw, out=dw)
        shrink(w, kept, decay).addcmul_(dw, scale, value=-1)


def shrink(w: Tensor, kept: Tensor, decay: float) -> Tensor:
    """Multiply a weight by what its decay leaves of it."""
    return w.mul_(kept) if decay else w


@writing_kernel(lambda node: piece_bytes(node, 2, 5))
def opt_step_sgd(
    w: Tensor,
    m: Tensor,
    g: Tensor,
    schedule: Tensor,
    factor: Tensor,
    places: Tensor | None = None,
    *,
    momentum: float,
    decay: float,
    out: tuple[Tensor, ...],
) -> None:
    """Update a weight and its momentum as torch.optim.SGD does, with decoupled weight decay."""
    rate = schedule[0]
    kept = 1 - rate * decay
    for dw, w, m in pieces(places, g, *out):
        m.mul_(momentum).addcmul_(dw, factor)
        shrink(w, kept, decay).addcmul_(m, rate, value=-1)


@writing_kernel()
def opt_momentum(m: Tensor, g: Tensor, factor: Tensor, *, momentum: float, out: tuple[Tensor, ...]) -> None:
    """Return the decayed momentum plus the gradient."""
    torch.mul(m, momentum, out=out[0]).addcmul_(g, factor)


@writing_kernel()
def opt_ahead(m: Tensor, g: Tensor, factor: Tensor, *, momentum: float, out: tuple[Tensor, ...]) -> None:
    """Return the decayed momentum plus the gradient once more: the lookahead of Nesterov."""
    opt_momentum(m, g, factor, momentum=momentum, out=out)


@writing_kernel()
def opt_unit(x: Tensor, squares: Tensor, *, eps: float, out: tuple[Tensor, ...]) -> None:
    """Return x divided by its norm, given the sum of its squares."""
    torch.div(x, squares.sqrt() + eps, out=out[0])


@writing_kernel(result_bytes)
def opt_blend(x: Tensor, y: Tensor, *, a: float, b: float, out: tuple[Tensor, ...]) -> None:
    """Return a x + b y."""
    torch.add(x * a, y, alpha=b, out=out[0])


@writing_kernel(result_bytes)
def opt_adapt(v: Tensor, x: Tensor, *, beta: float, eps: float, out: tuple[Tensor, ...]) -> None:
    """Return the moving average of x², and x divided by its root."""
    out[0].mul_(beta).addcmul_(x, x, value=1 - beta)
    torch.div(x, out[0].sqrt().add_(eps), out=out[1])


@writing_kernel()
def opt_step(
    w: Tensor, change: Tensor, schedule: Tensor, *, by: float, decay: float, out: tuple[Tensor, ...]
) -> None:
    """Return the decayed weight minus the change times the rate and `by`."""
    rate = schedule[0]
    shrink(out[0], 1 - rate * decay, decay).addcmul_(change, rate, value=-by)


@kernel()
def clip_factor(*squares: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Return min(1, limit / norm) and the norm, from sums of squares. A limit of 0 means none."""
    norm = torch.stack(squares).to(wide_type(squares[0])).sum().sqrt()
    factor = torch.ones_like(norm)
    if limit:
        factor = (limit / (norm + 1e-6)).clamp(max=1).where(norm.isfinite(), 1)
    return factor.to(squares[0].dtype), norm.to(squares[0].dtype)
