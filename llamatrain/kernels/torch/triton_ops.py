"""Triton kernels of ops that move memory: each reads its sources once and writes its results once.

Sources and results are contiguous; they are read as float32 whatever their type. A function here launches one
kernel; `fast.run_fast` calls it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # elements of a program, where rows do not matter
SUMMED_AT_ONCE = 8192  # elements of a program that adds up squares
PARTIAL_SUMS = 528  # programs that add up the gradient of a norm's weight; their sums are added afterwards


def blocks(x: Tensor) -> tuple[int]:
    """Return the number of programs for all elements."""
    return (triton.cdiv(x.numel(), BLOCK),)


def warps(width: int) -> int:
    """Return the number of warps for a row."""
    return max(1, min(16, width // 256))


# ---- norms -----------------------------------------------------------------


@triton.jit
def rms_norm_kernel(x, w, out, width, eps, SIZE: tl.constexpr):
    """Write one row."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    inside = columns < width
    values = tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(w + columns, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    tl.store(out + row * width + columns, (values * inverse * scale).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, w: Tensor, out: Tensor, *, eps: float) -> None:
    """Write x / rms(x) · w."""
    width = x.shape[-1]
    size = triton.next_power_of_2(width)
    rms_norm_kernel[(x.numel() // width,)](x, w, out, width, eps, SIZE=size, num_warps=warps(size))


@triton.jit
def rms_norm_back_kernel(
    dy,
    x,
    w,
    dx,
    sums,
    rows,
    width,
    eps,
    SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """Write every row whose number is this program's, modulo their number, and the sum for the weight."""
    program, columns = tl.program_id(0), tl.arange(0, SIZE)
    scale = tl.load(w + columns, mask=columns < width, other=0.0).to(tl.float32)
    total = tl.zeros((SIZE,), tl.float32)
    for number in range(ROUNDS):
        row = program + number * PROGRAMS
        inside = (columns < width) & (row < rows)
        start = row.to(tl.int64) * width
        values = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
        grads = tl.load(dy + start + columns, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
        normal = values * inverse
        scaled = grads * scale
        mean = tl.sum(scaled * normal, 0) / width
        tl.store(
            dx + start + columns, ((scaled - normal * mean) * inverse).to(dx.dtype.element_ty), mask=inside
        )
        total += grads * normal
    tl.store(sums + program * width + columns, total, mask=columns < width)


def rms_norm_back(dy: Tensor, x: Tensor, w: Tensor, dx: Tensor, dw: Tensor, *, eps: float) -> None:
    """Write the gradients of x and w; the order of their sums is fixed."""
    width = x.shape[-1]
    rows, size = x.numel() // width, triton.next_power_of_2(width)
    programs = min(rows, PARTIAL_SUMS)
    sums = torch.empty((programs, width), dtype=torch.float32, device=x.device)
    rms_norm_back_kernel[(programs,)](
        dy,
        x,
        w,
        dx,
        sums,
        rows,
        width,
        eps,
        SIZE=size,
        PROGRAMS=programs,
        ROUNDS=triton.cdiv(rows, programs),
        num_warps=warps(size),
    )
    torch.sum(sums, dim=0, out=dw)


# ---- rotation --------------------------------------------------------------


@triton.jit
def rope_pairs_kernel(
    x,
    positions,
    table,
    out,
    heads,
    width,
    pairs,
    direction,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write all heads of one token, whose pairs lie side by side."""
    token = tl.program_id(0).to(tl.int64)
    head, column, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :], tl.arange(0, WIDTH // 2)
    inside = (head < heads) & (column < width)
    row = table + tl.load(positions + token).to(tl.int64) * 2 * pairs + 2 * pair
    cos = tl.load(row, mask=pair < pairs, other=1.0).to(tl.float32)[None, :]
    sin = tl.load(row + 1, mask=pair < pairs, other=0.0).to(tl.float32)[None, :] * direction
    place = token * heads * width + head * width + column
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    left, right = tl.split(tl.reshape(values, (HEADS, WIDTH // 2, 2)))
    turned = tl.join(left * cos - right * sin, left * sin + right * cos)
    tl.store(out + place, tl.reshape(turned, (HEADS, WIDTH)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rope_halves_kernel(
    x,
    positions,
    table,
    out,
    heads,
    width,
    pairs,
    direction,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write all heads of one token, whose pairs lie half of the turned elements apart."""
    token = tl.program_id(0).to(tl.int64)
    head, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH // 2)[None, :]
    inside = (head < heads) & (pair < pairs)
    row = table + tl.load(positions + token).to(tl.int64) * 2 * pairs + pair
    cos = tl.load(row, mask=pair < pairs, other=1.0).to(tl.float32)
    sin = tl.load(row + pairs, mask=pair < pairs, other=0.0).to(tl.float32) * direction
    start = token * heads * width + head * width
    left = tl.load(x + start + pair, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(x + start + pairs + pair, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + start + pair, (left * cos - right * sin).to(out.dtype.element_ty), mask=inside)
    tl.store(out + start + pairs + pair, (left * sin + right * cos).to(out.dtype.element_ty), mask=inside)
    column = tl.arange(0, WIDTH)[None, :]
    others = (head < heads) & (column >= 2 * pairs) & (column < width)
    rest = tl.load(x + start + column, mask=others, other=0.0).to(tl.float32)
    tl.store(out + start + column, rest.to(out.dtype.element_ty), mask=others)


def rope(x: Tensor, positions: Tensor, table: Tensor, out: Tensor, *, direction: float, halves: bool) -> None:
    """Write heads (B, T, H, d) rotated forward (1) or backward (-1). `out` may be x: pairs are read first."""
    heads, width = x.shape[-2:]
    pairs = table.shape[2] if halves else table.shape[1]
    sizes = triton.next_power_of_2(heads), max(2, triton.next_power_of_2(width))
    kernel = rope_halves_kernel if halves else rope_pairs_kernel
    kernel[(positions.numel(),)](
        x,
        positions,
        table,
        out,
        heads,
        width,
        pairs,
        direction,
        HEADS=sizes[0],
        WIDTH=sizes[1],
        num_warps=warps(sizes[0] * sizes[1] // 4),
    )


# ---- gates -----------------------------------------------------------------


@triton.jit
def swiglu_kernel(gate, up, out, count, SIZE: tl.constexpr):
    """Write silu(gate) · up."""
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = index < count
    g = tl.load(gate + index, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + index, (g / (1 + tl.exp(-g)) * u).to(out.dtype.element_ty), mask=inside)


def swiglu(gate: Tensor, up: Tensor, out: Tensor) -> None:
    """Write silu(gate) · up."""
    swiglu_kernel[blocks(out)](gate, up, out, out.numel(), SIZE=BLOCK)


@triton.jit
def swiglu_back_kernel(dy, gate, up, dgate, dup, count, SIZE: tl.constexpr):
    """Write the gradients of gate and up."""
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = index < count
    d = tl.load(dy + index, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + index, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + index, mask=inside, other=0.0).to(tl.float32)
    s = 1 / (1 + tl.exp(-g))
    tl.store(dgate + index, (d * u * s * (1 + g * (1 - s))).to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + index, (d * g * s).to(dup.dtype.element_ty), mask=inside)


def swiglu_back(dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor) -> None:
    """Write the gradients of gate and up."""
    swiglu_back_kernel[blocks(dy)](dy, gate, up, dgate, dup, dy.numel(), SIZE=BLOCK)


# ---- losses ----------------------------------------------------------------


@triton.jit
def cross_entropy_kernel(
    logits, targets, weights, dloss, losses, grads, words, SIZE: tl.constexpr, ROUNDS: tl.constexpr
):
    """Write the loss of one row, and the gradient of its logits."""
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    target = tl.load(targets + row)
    top = tl.full((SIZE,), -float("inf"), tl.float32)
    total = tl.zeros((SIZE,), tl.float32)
    for number in range(ROUNDS):
        column = columns + number * SIZE
        x = tl.load(logits + row * words + column, mask=column < words, other=-float("inf"))
        larger = tl.maximum(top, x)
        kept = tl.where(larger == -float("inf"), 0.0, larger)
        total = total * tl.exp(top - kept) + tl.exp(x - kept)
        top = larger
    peak = tl.max(top, 0)
    sums = tl.log(tl.sum(total * tl.exp(top - peak), 0)) + peak
    has_target = target >= 0
    picked = tl.load(logits + row * words + tl.where(has_target, target, 0))
    tl.store(losses + row, tl.where(has_target, sums - picked, 0.0))
    factor = tl.where(has_target, tl.load(weights + row) * tl.load(dloss), 0.0)
    for number in range(ROUNDS):
        column = columns + number * SIZE
        x = tl.load(logits + row * words + column, mask=column < words, other=-float("inf"))
        d = (tl.exp(x - sums) - tl.where(column == target, 1.0, 0.0)) * factor
        tl.store(grads + row * words + column, d.to(grads.dtype.element_ty), mask=column < words)


def cross_entropy(
    logits: Tensor, targets: Tensor, weights: Tensor, dloss: Tensor, losses: Tensor, grads: Tensor
) -> None:
    """Write the losses of rows, and the gradients of their logits."""
    rows, words = logits.shape
    size = min(4096, triton.next_power_of_2(words))
    cross_entropy_kernel[(rows,)](
        logits,
        targets,
        weights,
        dloss,
        losses,
        grads,
        words,
        SIZE=size,
        ROUNDS=triton.cdiv(words, size),
        num_warps=8,
    )


# ---- sums ------------------------------------------------------------------


@triton.jit
def sum_sqr_kernel(x, sums, count, SIZE: tl.constexpr):
    """Write the sum of the squares of a part."""
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    values = tl.load(x + index, mask=index < count, other=0.0).to(tl.float64)
    tl.store(sums + tl.program_id(0), tl.sum(values * values, 0))


def sum_sqr(x: Tensor, out: Tensor) -> None:
    """Write the sum of all squares, added up in float64."""
    programs = triton.cdiv(x.numel(), SUMMED_AT_ONCE)
    sums = torch.empty(programs, dtype=torch.float64, device=x.device)
    sum_sqr_kernel[(programs,)](x, sums, x.numel(), SIZE=SUMMED_AT_ONCE, num_warps=8)
    out.copy_(sums.sum())


# ---- optimizer -------------------------------------------------------------


@triton.jit
def adamw_kernel(
    w,
    m,
    v,
    g,
    schedule,
    factor,
    count,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    decay,
    SIZE: tl.constexpr,
):
    """Update a part of a weight and its moments."""
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = index < count
    rate, bias1, bias2 = tl.load(schedule), tl.load(schedule + 1), tl.load(schedule + 2)
    grad = tl.load(g + index, mask=inside, other=0.0) * tl.load(factor)
    first = tl.load(m + index, mask=inside, other=0.0) * beta1 + grad * rest1
    second = tl.load(v + index, mask=inside, other=0.0) * beta2 + grad * grad * rest2
    weight = tl.load(w + index, mask=inside, other=0.0) * (1 - rate * decay)
    weight -= rate / bias1 * first / (tl.sqrt(second) / tl.sqrt(bias2) + eps)
    tl.store(m + index, first, mask=inside)
    tl.store(v + index, second, mask=inside)
    tl.store(w + index, weight, mask=inside)


def adamw(
    w: Tensor, m: Tensor, v: Tensor, g: Tensor, schedule: Tensor, factor: Tensor, **settings: float
) -> None:
    """Update a weight and its moments in place."""
    beta1, beta2 = settings["beta1"], settings["beta2"]
    adamw_kernel[blocks(w)](
        w,
        m,
        v,
        g,
        schedule,
        factor,
        w.numel(),
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        settings["eps"],
        settings["decay"],
        SIZE=BLOCK,
    )
