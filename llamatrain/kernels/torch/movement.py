"""Torch kernels that move elements: copies, parts, rows, sums, rotations and dropout."""

from typing import Any

import torch
from torch import Tensor

from llamatrain.graph.tensor import F32, DType, Node
from llamatrain.kernels.quantized import Blocks
from llamatrain.kernels.torch.dequantize import decode_bytes, dequantize
from llamatrain.kernels.torch.elementwise import Outs, copy_unless_same, in_full, several_results
from llamatrain.kernels.torch.fast import run_fast
from llamatrain.kernels.torch.registry import kernel, result_bytes, writing_kernel

Slices = tuple[tuple[int, int, int], ...]


def wide(x: Tensor) -> torch.dtype:
    """Return the type in which sums over many elements are added up."""
    return torch.float64 if x.device.type != "mps" else torch.float32


# ---- copies and parts ------------------------------------------------------


@writing_kernel()
def fill(*, shape: tuple[int, ...], value: float, dtype: DType = F32, out: Outs) -> None:
    """Write one number to all elements."""
    out[0].fill_(value)


@writing_kernel()
def cast(x: Tensor, *, dtype: DType, out: Outs) -> None:
    """Write x in another type."""
    out[0].copy_(x)


@writing_kernel()
def cont(x: Tensor, *, out: Outs) -> None:
    """Write x in C order."""
    out[0].copy_(x)


@writing_kernel()
def split_columns(x: Tensor, *, sizes: tuple[int, ...], out: Outs) -> None:
    """Write parts of x with these numbers of columns."""
    for part, place in zip(x.split(sizes, dim=-1), out, strict=True):
        place.copy_(part)


@writing_kernel()
def join_columns(*parts: Tensor, dtype: DType | None = None, out: Outs) -> None:
    """Write the columns of the parts side by side, perhaps in another type."""
    for part, place in zip(parts, out[0].split([part.shape[-1] for part in parts], dim=-1), strict=True):
        place.copy_(part)


def part_of(x: Tensor, slices: Slices) -> Tensor:
    """Return a view of a part, given by (start, stop, step) of each axis."""
    return x[tuple(slice(*each) for each in slices)]


@writing_kernel()
def acc(x: Tensor, y: Tensor, *, slices: Slices, into: bool = False, out: Outs) -> None:
    """Write x with y added to a part of it."""
    copy_unless_same(x, out[0])
    part_of(out[0], slices).add_(y)


@writing_kernel()
def set(x: Tensor, y: Tensor, *, slices: Slices, into: bool = False, out: Outs) -> None:
    """Write x with a part replaced by y."""
    copy_unless_same(x, out[0])
    part_of(out[0], slices).copy_(y)


@writing_kernel()
def cpy(x: Tensor, y: Tensor, *, into: bool = False, out: Outs) -> None:
    """Write y in the type of x."""
    out[0].copy_(y)


@kernel(several_results)
def add_cast(a: Tensor, b: Tensor, *, dtype: DType) -> Tensor:
    """Return a + b, computed in full precision."""
    return in_full(a) + in_full(b)


@writing_kernel()
def repeat(x: Tensor, *, shape: tuple[int, ...], out: Outs) -> None:
    """Write copies of x until the shape is filled."""
    copies = [size // n for size, n in zip(shape, x.shape, strict=True)]
    folded = [part for count, n in zip(copies, x.shape, strict=True) for part in (count, n)]
    out[0].view(folded).copy_(x.view([part for n in x.shape for part in (1, n)]))


@kernel()
def repeat_back(y: Tensor, *, shape: tuple[int, ...]) -> Tensor:
    """Return the sum of all copies of `shape` in y."""
    folded = [part for size, n in zip(y.shape, shape, strict=True) for part in (size // n, n)]
    return y.reshape(folded).sum(dim=tuple(range(0, len(folded), 2))) if folded else y


@kernel()
def diag(x: Tensor) -> Tensor:
    """Return a matrix with x on its diagonal."""
    return x * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)


def mask_above(x: Tensor, past: int, value: float) -> Tensor:
    """Return x with another value where column > row + past."""
    rows, columns = (torch.arange(size, device=x.device) for size in x.shape[-2:])
    return torch.where(columns > rows[:, None] + past, value, x)


@kernel()
def diag_mask_inf(x: Tensor, *, past: int = 0) -> Tensor:
    """Return x with -inf where column > row + past."""
    return mask_above(x, past, -torch.inf)


@kernel()
def diag_mask_zero(x: Tensor, *, past: int = 0) -> Tensor:
    """Return x with 0 where column > row + past."""
    return mask_above(x, past, 0.0)


# ---- sums ------------------------------------------------------------------


@kernel()
def sum(x: Tensor) -> Tensor:
    """Return the sum of all elements."""
    return torch.sum(x, dtype=wide(x))


@kernel()
def mean(x: Tensor) -> Tensor:
    """Return the mean of all elements."""
    return torch.mean(x, dtype=wide(x))


@kernel()
def sum_rows(x: Tensor) -> Tensor:
    """Return sums over the last axis, which stays with size 1."""
    return x.sum(dim=-1, keepdim=True)


@writing_kernel(lambda node: 512 + node.sources[0].size // 512)  # sums of parts
def sum_sqr(x: Tensor, *, out: Outs) -> None:
    """Write the sum of all squares."""
    if not run_fast("sum_sqr", x, out[0]):
        out[0].copy_(torch.linalg.vector_norm(x, dtype=wide(x)).square_())


# ---- rows ------------------------------------------------------------------


def gathered_bytes(node: Node) -> int:
    """Return the bytes of decoded rows, and of what decoding needs."""
    (table, ids), decoded = node.sources, result_bytes(node)
    kind = getattr(table.dtype, "kind", None)
    return decoded + (
        decode_bytes(kind, ids.size, table.shape[1]) + ids.size * kind.row_bytes(table.shape[1])
        if kind
        else 0
    )


@writing_kernel(gathered_bytes)
def get_rows(w: Tensor | Blocks, ids: Tensor, *, out: Outs) -> None:
    """Write rows of w by number."""
    rows = out[0].view(-1, out[0].shape[-1])
    if isinstance(w, Blocks):
        dequantize(w.raw.index_select(0, ids.reshape(-1)), w.kind, rows)
    elif w.dtype is rows.dtype:
        torch.index_select(w, 0, ids.reshape(-1), out=rows)
    else:
        rows.copy_(w.index_select(0, ids.reshape(-1)))


@kernel()
def get_rows_back(dy: Tensor, ids: Tensor, *, rows: int) -> Tensor:
    """Return the sums of the rows of dy that have the same number; the order of the sum is fixed."""
    return torch.ops.aten.embedding_dense_backward(
        dy.reshape(-1, dy.shape[-1]), ids.reshape(-1).long(), rows, -1, False
    )


@writing_kernel()
def set_rows(x: Tensor, rows: Tensor, ids: Tensor, *, into: bool = False, out: Outs) -> None:
    """Write x with rows replaced by number; of duplicate numbers, the last row wins."""
    copy_unless_same(x, out[0])
    out[0].index_copy_(0, ids.long(), rows[last_of_equals(ids)])


def last_of_equals(ids: Tensor) -> Tensor:
    """Return, for each number, the index of the last equal one."""
    indices = torch.arange(len(ids), device=ids.device)
    return torch.where(ids[:, None] == ids, indices, -1).amax(dim=1)


# ---- rotation --------------------------------------------------------------


def rotate(x: Tensor, positions: Tensor, table: Tensor, direction: int, halves: bool, place: Tensor) -> None:
    """Write x with its pairs rotated by the table's angles, forward (1) or backward (-1)."""
    if run_fast("rope", x, positions, table, place, direction=direction, halves=halves):
        return
    table = table if halves else table.transpose(1, 2)
    pairs = table.shape[2]
    angles = table.contiguous().index_select(0, positions.reshape(-1)).view(*positions.shape, 1, 2, pairs)
    cos, sin = angles[..., 0, :], angles[..., 1, :] * direction
    one, other = (
        (slice(0, pairs), slice(pairs, 2 * pairs))
        if halves
        else (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
    )
    left, right = x[..., one], x[..., other]
    turned = left * cos - right * sin, left * sin + right * cos
    if 2 * pairs < x.shape[-1]:
        copy_unless_same(x[..., 2 * pairs :], place[..., 2 * pairs :])
    place[..., one].copy_(turned[0])
    place[..., other].copy_(turned[1])


@writing_kernel(several_results)
def rope(x: Tensor, positions: Tensor, table: Tensor, *, halves: bool = False, out: Outs) -> None:
    """Write heads rotated by their positions."""
    rotate(x, positions, table, 1, halves, out[0])


@writing_kernel(several_results)
def rope_back(dy: Tensor, positions: Tensor, table: Tensor, *, halves: bool = False, out: Outs) -> None:
    """Write heads rotated back."""
    rotate(dy, positions, table, -1, halves, out[0])


# ---- dropout ---------------------------------------------------------------

WORD = 0xFFFFFFFF


def mix_bits(z: Tensor) -> Tensor:
    """Mix the bits of 32-bit numbers, which are held in 64 bits (the finalizer of MurmurHash3)."""
    z = ((z ^ (z >> 16)) * 0x85EBCA6B) & WORD
    z = ((z ^ (z >> 13)) * 0xC2B2AE35) & WORD
    return z ^ (z >> 16)


@kernel(lambda node: 6 * result_bytes(node))
def dropout(x: Tensor, key: Tensor, tokens: Tensor | None = None, **how: Any) -> Tensor:
    """Return x with a share of its elements set to zero and the others scaled up."""
    rate, salt, length = how["rate"], how["salt"], how["length"]
    count, size = len(x), x.numel() // max(1, len(x))
    seeds = key.long() & WORD
    tokens = torch.arange(count, device=x.device) if tokens is None else tokens.long()
    rows, at = torch.div(tokens, length, rounding_mode="floor"), tokens % length
    first = mix_bits(torch.full((1,), salt & WORD, device=x.device))
    starts = mix_bits((mix_bits((first + seeds[:1]) & WORD) + seeds[1:2] + rows) & WORD)
    places = (at[:, None] * size + torch.arange(size, device=x.device)) & WORD
    drawn = mix_bits((((places * 0x9E3779B9) & WORD) + starts[:, None]) & WORD).view(x.shape)
    return torch.where(drawn < int(rate * 2**32), 0, x * (1 / (1 - rate)))
