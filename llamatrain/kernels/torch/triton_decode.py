"""Triton kernels that decode quantized weights: each reads the packed bytes once and writes the result once.

A program decodes a tile of blocks. Its threads read eight bytes of codes each, and everything that lies in these
bytes is decoded and written by the same thread, 16 bytes at a time for bfloat16, so that scales are unpacked
once for each 16 to 32 weights. All types have an even number of bytes in a block, and half floats and pairs of
bytes are read as such.

The product of a scale and a code that an offset follows is exact (see dequantize.py), so that a fused
multiply-add rounds like two operations.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from llamatrain.gguf.quants.kinds import IQ4_VALUES
from llamatrain.gguf.types import GgmlType

RESULTS = (torch.bfloat16, torch.float32, torch.float16)
WARPS = 8
CODE_BYTES = 8 * 32 * WARPS  # of a program
LARGEST_INT = 2**31 - 1  # blocks are numbered with 32 bits
LOW_VALUES, HIGH_VALUES = (  # of IQ4 codes, plus 128, as bytes of a word
    tl.constexpr(int.from_bytes((value + 128 for value in part), "little", signed=True))
    for part in (IQ4_VALUES[:8], IQ4_VALUES[8:])
)


@dataclass(frozen=True)
class Decoder:
    """The kernel of a type, and the blocks that a program decodes."""

    kernel: Any
    tile: int


DECODERS: dict[str, Decoder] = {}


def can_decode(kind: GgmlType, raw: torch.Tensor, out: torch.Tensor) -> bool:
    """Return whether `decode` knows a type and the places of the weights and the result."""
    return (
        kind.name in DECODERS
        and out.dtype in RESULTS
        and raw.device == out.device
        and raw.stride(-1) == out.stride(-1) == 1
        and raw.data_ptr() % 2 == raw.stride(0) % 2 == 0
        and out.numel() // kind.block_size <= LARGEST_INT - CODE_BYTES
    )


def decode(raw: torch.Tensor, kind: GgmlType, out: torch.Tensor) -> None:
    """Decode rows of blocks (rows, row_bytes) to `out` (rows, columns) with one launch."""
    rows, columns = out.shape
    per_row, decoder = columns // kind.block_size, DECODERS[kind.name]
    total = rows * per_row
    if not total:
        return
    apart = rows > 1 and (raw.stride(0) != raw.shape[1] or out.stride(0) != columns)
    pitches = (raw.stride(0), out.stride(0)) if apart else (0, 0)
    with _use_device(raw.device):
        decoder.kernel[(triton.cdiv(total, decoder.tile),)](
            raw, out, *pitches, total, per_row, APART=apart, TILE=decoder.tile, num_warps=WARPS
        )


def _use_device(device: torch.device) -> AbstractContextManager:
    """Return a context in which kernels are launched on a device."""
    return nullcontext() if device.type == "cpu" else getattr(torch, device.type).device(device)


def _decoder(code_bytes: int) -> Callable[[Callable], Any]:
    """Compile and register the kernel of the type that it is named after, which has some bytes of codes."""

    def register(kernel: Callable) -> Any:
        compiled = triton.jit(kernel, do_not_specialize=["total", "per_row"])
        name = kernel.__name__.upper().strip("_")
        DECODERS[name] = Decoder(compiled, CODE_BYTES // code_bytes)
        return compiled

    return register


# ---- parts of kernels ---------------------------------------------------------------------------


@triton.jit
def _find_blocks(
    raw: tl.tensor,
    out: tl.tensor,
    raw_pitch: tl.tensor,
    out_pitch: tl.tensor,
    total: tl.tensor,
    per_row: tl.tensor,
    APART: tl.constexpr,
    TILE: tl.constexpr,
    BYTES: tl.constexpr,
    SIZE: tl.constexpr,
) -> Any:
    """Return where this program's blocks and their results begin, and which of the blocks exist."""
    block = tl.program_id(0) * TILE + tl.arange(0, TILE)
    if APART:
        row = block // per_row
        column = (block - row * per_row).to(tl.int64)
        source = raw + row.to(tl.int64) * raw_pitch + column * BYTES
        to = out + row.to(tl.int64) * out_pitch + column * SIZE
    else:
        source = raw + block.to(tl.int64) * BYTES
        to = out + block.to(tl.int64) * SIZE
    return source, to, block < total


@triton.jit
def _load_byte(place: tl.tensor, mask: tl.tensor) -> Any:
    return tl.load(place, mask=mask, other=0).to(tl.int32)


@triton.jit
def _load_signed(place: tl.tensor, mask: tl.tensor) -> Any:
    return tl.load(place.to(tl.pointer_type(tl.int8)), mask=mask, other=0).to(tl.int32)


@triton.jit
def _load_pair(place: tl.tensor, mask: tl.tensor) -> Any:
    """Return two bytes, the first in the low bits."""
    return tl.load(place.to(tl.pointer_type(tl.uint16)), mask=mask, other=0).to(tl.int32)


@triton.jit
def _load_half(place: tl.tensor, mask: tl.tensor) -> Any:
    return tl.load(place.to(tl.pointer_type(tl.float16)), mask=mask, other=0).to(tl.float32)


@triton.jit
def _subtract(codes: tl.tensor, number: tl.constexpr) -> Any:
    """Return codes of up to 23 bits, less a number, as floats.

    The last bits of 2 ** 23 as a float count ones. Processors convert numbers with signs more slowly.
    """
    return (codes | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + number)


@triton.jit
def _store(place: tl.tensor, value: tl.tensor, mask: tl.tensor) -> None:
    tl.store(place, value.to(place.dtype.element_ty), mask=mask)


@triton.jit
def _look_up_iq4(codes: tl.tensor) -> Any:
    """Return the values of four-bit codes."""
    values = tl.where(codes < 8, LOW_VALUES, HIGH_VALUES).to(tl.int64)
    return _subtract((values >> ((codes & 7) * 8).to(tl.int64)).to(tl.int32) & 255, 128)


@triton.jit
def _load_k_scales(source: tl.tensor, fourth: tl.tensor, mask: tl.tensor) -> Any:
    """Return the scales and offsets of two successive groups of Q4_K or Q5_K: pairs of 6-bit numbers."""
    place = source + 4 + fourth % 2 * 2
    scale, offset, rest = _load_pair(place, mask), _load_pair(place + 4, mask), _load_pair(place + 8, mask)
    first = fourth < 2
    scale = tl.where(first, scale & 0x3F3F, rest & 0x0F0F | scale >> 2 & 0x3030)
    offset = tl.where(first, offset & 0x3F3F, rest >> 4 & 0x0F0F | offset >> 2 & 0x3030)
    d, m = _load_half(source, mask), _load_half(source + 2, mask)
    return (
        d * (scale & 255).to(tl.float32),
        m * (offset & 255).to(tl.float32),
        d * (scale >> 8).to(tl.float32),
        m * (offset >> 8).to(tl.float32),
    )


# ---- blocks of 256 ------------------------------------------------------------------------------


@_decoder(128)
def _q4_k(
    raw: tl.tensor,
    out: tl.tensor,
    raw_pitch: tl.tensor,
    out_pitch: tl.tensor,
    total: tl.tensor,
    per_row: tl.tensor,
    APART: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Decode fourths of a block: 32 weights in the low halves of bytes, then 32 in the high ones."""
    source, to, exists = _find_blocks(
        raw, out, raw_pitch, out_pitch, total, per_row, APART, TILE, BYTES=144, SIZE=256
    )
    fourth, i = tl.arange(0, 4)[None, :], tl.arange(0, 32)[None, None, :]
    scale0, offset0, scale1, offset1 = _load_k_scales(source[:, None], fourth, exists[:, None])
    mask = exists[:, None, None]
    codes = _load_byte(source[:, None, None] + (16 + 32 * fourth[:, :, None] + i), mask)
    place = to[:, None, None] + (64 * fourth[:, :, None] + i)
    low, high = (codes & 15).to(tl.float32), (codes >> 4).to(tl.float32)
    _store(place, scale0[:, :, None] * low - offset0[:, :, None], mask)
    _store(place + 32, scale1[:, :, None] * high - offset1[:, :, None], mask)


@_decoder(64)
def _q6_k(
    raw: tl.tensor,
    out: tl.tensor,
    raw_pitch: tl.tensor,
    out_pitch: tl.tensor,
    total: tl.tensor,
    per_row: tl.tensor,
    APART: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Decode halves of a block: four times 32 weights, whose high bits share 32 bytes."""
    source, to, exists = _find_blocks(
        raw, out, raw_pitch, out_pitch, total, per_row, APART, TILE, BYTES=210, SIZE=256
    )
    half, part = tl.arange(0, 2)[None, :, None], tl.arange(0, 2)[None, None, :]
    i = (16 * part)[:, :, :, None] + tl.arange(0, 16)[None, None, None, :]
    scales, mask = source[:, None, None] + 192 + (8 * half + part), exists[:, None, None]
    d = _load_half(source + 208, exists)[:, None, None]
    codes, all_mask = source[:, None, None, None] + i, mask[:, :, :, None]
    half = half[:, :, :, None]
    low0 = _load_byte(codes + 64 * half, all_mask)
    low1 = _load_byte(codes + (64 * half + 32), all_mask)
    high = _load_byte(codes + (32 * half + 128), all_mask)
    place = to[:, None, None, None] + (128 * half + i)
    for quarter in tl.static_range(4):
        low = (low0 if quarter % 2 == 0 else low1) >> (4 * (quarter // 2)) & 15
        code = _subtract(low | (high >> (2 * quarter) & 3) << 4, 32)
        scale = d * _load_signed(scales + 2 * quarter, mask).to(tl.float32)
        _store(place + 32 * quarter, scale[:, :, :, None] * code, all_mask)


@_decoder(128)
def _q5_k(
    raw: tl.tensor,
    out: tl.tensor,
    raw_pitch: tl.tensor,
    out_pitch: tl.tensor,
    total: tl.tensor,
    per_row: tl.tensor,
    APART: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Decode as Q4_K. The fifth bits of all fourths share 32 bytes."""
    source, to, exists = _find_blocks(
        raw, out, raw_pitch, out_pitch, total, per_row, APART, TILE, BYTES=176, SIZE=256
    )
    fourth, i = tl.arange(0, 4)[None, :], tl.arange(0, 32)[None, None, :]
    scale0, offset0, scale1, offset1 = _load_k_scales(source[:, None], fourth, exists[:, None])
    mask, fourth = exists[:, None, None], fourth[:, :, None]
    codes = _load_byte(source[:, None, None] + (48 + 32 * fourth + i), mask)
    bits = _load_byte(source[:, None, None] + (16 + 0 * fourth + i), mask) >> (2 * fourth)
    place = to[:, None, None] + (64 * fourth + i)
    low = (codes & 15 | (bits & 1) << 4).to(tl.float32)
    high = (codes >> 4 | (bits & 2) << 3).to(tl.float32)
    _store(place, scale0[:, :, None] * low - offset0[:, :, None], mask)
    _store(place + 32, scale1[:, :, None] * high - offset1[:, :, None], mask)


@_decoder(64)
def _q3_k(
    raw: tl.tensor,
    out: tl.tensor,
    raw_pitch: tl.tensor,
    out_pitch: tl.tensor,
    total: tl.tensor,
    per_row: tl.tensor,
    APART: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Decode halves of a block: four times 32 weights in 32 bytes; the third bits of both share 32 bytes."""
    source, to, exists = _find_blocks(
        raw, out, raw_pitch, out_pitch, total, per_row, APART, TILE, BYTES=110, SIZE=256
    )
    half, part = tl.arange(0, 2)[None, :, None], tl.arange(0, 2)[None, None, :]
    i = (16 * part)[:, :, :, None] + tl.arange(0, 16)[None, None, None, :]
    scales, mask = source[:, None, None] + 96, exists[:, None, None]
    d = _load_half(source + 108, exists)[:, None, None]
    codes, all_mask = source[:, None, None, None] + i, mask[:, :, :, None]
    halves = half[:, :, :, None]
    low = _load_byte(codes + (32 * halves + 32), all_mask)
    high = _load_byte(codes + 0 * halves, all_mask) >> (4 * halves)
    place = to[:, None, None, None] + (128 * halves + i)
    for quarter in tl.static_range(4):
        first = _load_byte(scales + (2 * quarter + part + 0 * half), mask) >> (4 * half) & 15
        last = _load_byte(scales + (8 + 2 * (quarter % 2) + part + 0 * half), mask)
        last = last >> (4 * half + 2 * (quarter // 2)) & 3
        scale = d * ((first | last << 4) - 32).to(tl.float32)
        code = _subtract(low >> (2 * quarter) & 3 | (high >> quarter & 1) << 2, 4)
        _store(place + 32 * quarter, scale[:, :, :, None] * code, all_mask)


@_decoder(64)
def _q2_k(
    raw: tl.tensor,
    out: tl.tensor,
    raw_pitch: tl.tensor,
    out_pitch: tl.tensor,
    total: tl.tensor,
    per_row: tl.tensor,
    APART: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Decode halves of a block: four times 32 weights in 32 bytes."""
    source, to, exists = _find_blocks(
        raw, out, raw_pitch, out_pitch, total, per_row, APART, TILE, BYTES=84, SIZE=256
    )
    half, part = tl.arange(0, 2)[None, :, None], tl.arange(0, 2)[None, None, :]
    i = (16 * part)[:, :, :, None] + tl.arange(0, 16)[None, None, None, :]
    scales, mask = source[:, None, None] + (8 * half + part), exists[:, None, None]
    d = _load_half(source + 80, exists)[:, None, None]
    m = _load_half(source + 82, exists)[:, None, None]
    all_mask, half = mask[:, :, :, None], half[:, :, :, None]
    codes = _load_byte(source[:, None, None, None] + (32 * half + 16 + i), all_mask)
    place = to[:, None, None, None] + (128 * half + i)
    for quarter in tl.static_range(4):
        packed = _load_byte(scales + 2 * quarter, mask)
        scale, offset = d * (packed & 15).to(tl.float32), m * (packed >> 4).to(tl.float32)
        code = (codes >> (2 * quarter) & 3).to(tl.float32)
        _store(place + 32 * quarter, scale[:, :, :, None] * code - offset[:, :, :, None], all_mask)


@_decoder(128)
def _iq4_xs(
    raw: tl.tensor,
    out: tl.tensor,
    raw_pitch: tl.tensor,
    out_pitch: tl.tensor,
    total: tl.tensor,
    per_row: tl.tensor,
    APART: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Decode eighths of a block: 16 weights in the low halves of bytes, then 16 in the high ones."""
    source, to, exists = _find_blocks(
        raw, out, raw_pitch, out_pitch, total, per_row, APART, TILE, BYTES=136, SIZE=256
    )
    eighth, i = tl.arange(0, 8)[None, :], tl.arange(0, 16)[None, None, :]
    low = _load_byte(source[:, None] + (4 + eighth // 2), exists[:, None]) >> (4 * (eighth % 2)) & 15
    high = _load_pair(source + 2, exists)[:, None] >> (2 * eighth) & 3
    scale = _load_half(source, exists)[:, None] * ((low | high << 4) - 32).to(tl.float32)
    mask, eighth = exists[:, None, None], eighth[:, :, None]
    codes = _load_byte(source[:, None, None] + (8 + 16 * eighth + i), mask)
    place = to[:, None, None] + (32 * eighth + i)
    _store(place, scale[:, :, None] * _look_up_iq4(codes & 15), mask)
    _store(place + 16, scale[:, :, None] * _look_up_iq4(codes >> 4), mask)


# ---- blocks of 32 -------------------------------------------------------------------------------


@_decoder(16)
def _q4_0(
    raw: tl.tensor,
    out: tl.tensor,
    raw_pitch: tl.tensor,
    out_pitch: tl.tensor,
    total: tl.tensor,
    per_row: tl.tensor,
    APART: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Decode 16 weights in the low halves of bytes, then 16 in the high ones."""
    source, to, exists = _find_blocks(
        raw, out, raw_pitch, out_pitch, total, per_row, APART, TILE, BYTES=18, SIZE=32
    )
    i, mask = tl.arange(0, 16)[None, :], exists[:, None]
    d, codes = _load_half(source, exists)[:, None], _load_byte(source[:, None] + (2 + i), mask)
    place = to[:, None] + i
    _store(place, d * _subtract(codes & 15, 8), mask)
    _store(place + 16, d * _subtract(codes >> 4, 8), mask)


@_decoder(32)
def _q8_0(
    raw: tl.tensor,
    out: tl.tensor,
    raw_pitch: tl.tensor,
    out_pitch: tl.tensor,
    total: tl.tensor,
    per_row: tl.tensor,
    APART: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Decode bytes with signs."""
    source, to, exists = _find_blocks(
        raw, out, raw_pitch, out_pitch, total, per_row, APART, TILE, BYTES=34, SIZE=32
    )
    i, mask = tl.arange(0, 32)[None, :], exists[:, None]
    d, codes = _load_half(source, exists)[:, None], _load_byte(source[:, None] + (2 + i), mask)
    _store(to[:, None] + i, d * _subtract(codes ^ 128, 128), mask)


@_decoder(16)
def _q5_0(
    raw: tl.tensor,
    out: tl.tensor,
    raw_pitch: tl.tensor,
    out_pitch: tl.tensor,
    total: tl.tensor,
    per_row: tl.tensor,
    APART: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Decode as Q4_0. The fifth bits of both halves lie in two bytes each."""
    source, to, exists = _find_blocks(
        raw, out, raw_pitch, out_pitch, total, per_row, APART, TILE, BYTES=22, SIZE=32
    )
    i, mask = tl.arange(0, 16)[None, :], exists[:, None]
    d, codes = _load_half(source, exists)[:, None], _load_byte(source[:, None] + (6 + i), mask)
    bits0, bits1 = _load_pair(source + 2, exists)[:, None], _load_pair(source + 4, exists)[:, None]
    place = to[:, None] + i
    _store(place, d * _subtract(codes & 15 | (bits0 >> i & 1) << 4, 16), mask)
    _store(place + 16, d * _subtract(codes >> 4 | (bits1 >> i & 1) << 4, 16), mask)


@_decoder(16)
def _q4_1(
    raw: tl.tensor,
    out: tl.tensor,
    raw_pitch: tl.tensor,
    out_pitch: tl.tensor,
    total: tl.tensor,
    per_row: tl.tensor,
    APART: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Decode as Q4_0, with an offset."""
    source, to, exists = _find_blocks(
        raw, out, raw_pitch, out_pitch, total, per_row, APART, TILE, BYTES=20, SIZE=32
    )
    i, mask = tl.arange(0, 16)[None, :], exists[:, None]
    d, m = _load_half(source, exists)[:, None], _load_half(source + 2, exists)[:, None]
    codes, place = _load_byte(source[:, None] + (4 + i), mask), to[:, None] + i
    _store(place, d * (codes & 15).to(tl.float32) + m, mask)
    _store(place + 16, d * (codes >> 4).to(tl.float32) + m, mask)


@_decoder(16)
def _q5_1(
    raw: tl.tensor,
    out: tl.tensor,
    raw_pitch: tl.tensor,
    out_pitch: tl.tensor,
    total: tl.tensor,
    per_row: tl.tensor,
    APART: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Decode as Q5_0, with an offset."""
    source, to, exists = _find_blocks(
        raw, out, raw_pitch, out_pitch, total, per_row, APART, TILE, BYTES=24, SIZE=32
    )
    i, mask = tl.arange(0, 16)[None, :], exists[:, None]
    d, m = _load_half(source, exists)[:, None], _load_half(source + 2, exists)[:, None]
    bits0, bits1 = _load_pair(source + 4, exists)[:, None], _load_pair(source + 6, exists)[:, None]
    codes, place = _load_byte(source[:, None] + (8 + i), mask), to[:, None] + i
    _store(place, d * (codes & 15 | (bits0 >> i & 1) << 4).to(tl.float32) + m, mask)
    _store(place + 16, d * (codes >> 4 | (bits1 >> i & 1) << 4).to(tl.float32) + m, mask)


@_decoder(16)
def _iq4_nl(
    raw: tl.tensor,
    out: tl.tensor,
    raw_pitch: tl.tensor,
    out_pitch: tl.tensor,
    total: tl.tensor,
    per_row: tl.tensor,
    APART: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Decode as Q4_0. Codes stand for values that are not equally far apart."""
    source, to, exists = _find_blocks(
        raw, out, raw_pitch, out_pitch, total, per_row, APART, TILE, BYTES=18, SIZE=32
    )
    i, mask = tl.arange(0, 16)[None, :], exists[:, None]
    d, codes = _load_half(source, exists)[:, None], _load_byte(source[:, None] + (2 + i), mask)
    place = to[:, None] + i
    _store(place, d * _look_up_iq4(codes & 15), mask)
    _store(place + 16, d * _look_up_iq4(codes >> 4), mask)
