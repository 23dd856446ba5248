"""Decodes quantized weights of GGUF files with torch, on any device.

A function of each type turns blocks into integer codes, a scale and perhaps an offset; then one operation writes
scale · code + offset to the result. What counts on a graphics processor is how many bytes are moved and how many
numbers the slow kernels for strided tensors handle, so the codes stay bytes, are unpacked in words of up to
eight bytes, and are not shifted if the scale can be divided instead: a code that lies in the high bits of its
byte is a multiple of a power of two. Where Triton works, its kernels decode the types that they know
(triton_decode.py).

Where there is an offset, the scale has at most 17 significant bits and the code five. Their product is exact, so
that a fused multiply-add, which torch uses on some devices, rounds like two operations.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from math import gcd
from types import ModuleType

import numpy as np
import torch

from llamatrain.gguf.quants.kinds import IQ4_VALUES
from llamatrain.gguf.types import GgmlType
from llamatrain.platform.terminal import log_line

CHUNK_ELEMENTS = 1 << 24  # weights that are decoded at once
SMALL_CHUNK_ELEMENTS = 1 << 20  # the same on a CPU, which converts operands in memory, or if rows are copied
CONVERTED_BYTES = 8  # of a weight on a CPU: the code as float32, and the result if it is not float32
ALIGNMENT = 8  # bytes of the largest word
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PLAIN = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
E2M1_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled
BITS = (1, 2, 4, 8)
PAIRS_OF_BITS = (3, 12, 48, 192)
NIBBLES = (15, 240)

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # codes, scale, offset


@dataclass(frozen=True)
class Layout:
    """The decoder of a type's blocks, and the bytes for each weight that it takes besides conversions."""

    parts: Callable[[torch.Tensor], Parts]  # of blocks (rows, blocks, bytes); codes are (rows, blocks, ...)
    scratch: float  # as measured on a CPU


LAYOUTS: dict[str, Layout] = {}
not_in_triton: set[str] = set()  # types whose Triton kernels could not be compiled or launched


def can_decode(kind: GgmlType) -> bool:
    """Return whether `dequantize` knows a type."""
    return kind.name in PLAIN or kind.name in LAYOUTS


def decode_bytes(kind: GgmlType, rows: int, columns: int) -> int:
    """Return the bytes that decoding allocates besides the result, at most, without tables."""
    large, small = (
        min(rows, max(1, chunk // max(1, columns))) * columns
        for chunk in (CHUNK_ELEMENTS, SMALL_CHUNK_ELEMENTS)
    )
    copied = small // kind.block_size * kind.block_bytes
    if kind.name in PLAIN:
        return copied
    scratch = LAYOUTS[kind.name].scratch
    return max(int(large * scratch), int(small * (scratch + CONVERTED_BYTES)) + copied)


def dequantize(raw: torch.Tensor, kind: GgmlType, out: torch.Tensor) -> torch.Tensor:
    """Decode rows of blocks (rows, row_bytes) to `out` (rows, columns): float32, bfloat16 or float64.

    Float32 results have the bits of `gguf.quants.decode`, and bfloat16 results are these, rounded to nearest
    even; float64 results keep all bits of long numbers. Tables are copied to a device when a type is first
    decoded there; after that, a CUDA graph can record the work.
    """
    rows, columns = out.shape
    if raw.shape != (rows, kind.row_bytes(columns)):
        raise ValueError(f"{kind.name} rows of {columns} do not have the shape {tuple(raw.shape)} in bytes")
    if not out.numel() or _decode_in_triton(raw, kind, out):
        return out
    aligned = _has_whole_words(raw, kind)
    if kind.name in PLAIN and aligned:
        return out.copy_(raw.view(PLAIN[kind.name]))
    chunk = CHUNK_ELEMENTS if aligned and raw.device.type != "cpu" else SMALL_CHUNK_ELEMENTS
    step = max(1, chunk // columns)
    for lo in range(0, rows, step):
        part = raw[lo : lo + step]
        _decode_rows(part if aligned else _copy(part), kind, out[lo : lo + step])
    return out


def _decode_in_triton(raw: torch.Tensor, kind: GgmlType, out: torch.Tensor) -> bool:
    """Return True if a Triton kernel has decoded rows, or False if torch has to."""
    if kind.name not in LAYOUTS or kind.name in not_in_triton:
        return False
    try:
        kernels = _load_triton(raw.device.type)
        if not kernels or not kernels.can_decode(kind, raw, out):
            return False
        kernels.decode(raw, kind, out)
    except Exception as error:
        not_in_triton.add(kind.name)
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        log_line(f"Triton cannot decode {kind.name} here, so torch does, more slowly: {reason[:120]}")
        return False
    return True


@cache
def _load_triton(device_type: str) -> ModuleType | None:
    """Return the module of Triton kernels, or None if the device or the installation has no Triton."""
    if device_type not in ("cuda", "xpu") and os.environ.get("TRITON_INTERPRET") != "1":
        return None
    if find_spec("triton") is None:
        return None
    from llamatrain.kernels.torch import triton_decode

    return triton_decode


def _has_whole_words(raw: torch.Tensor, kind: GgmlType) -> bool:
    """Return whether rows can be read as words that are as long as the blocks allow."""
    size = gcd(kind.block_bytes, ALIGNMENT)
    places = raw.data_ptr(), raw.storage_offset(), raw.stride(0)
    return raw.stride(1) == 1 and not any(place % size for place in places)


def _copy(rows: torch.Tensor) -> torch.Tensor:
    return rows.clone(memory_format=torch.contiguous_format)


def _decode_rows(raw: torch.Tensor, kind: GgmlType, out: torch.Tensor) -> None:
    if kind.name in PLAIN:
        out.copy_(raw.view(PLAIN[kind.name]))
        return
    codes, scale, offset = LAYOUTS[kind.name].parts(raw.unflatten(1, (-1, kind.block_bytes)))
    target = out.unflatten(1, (codes.shape[1], *codes.shape[2:]))
    if offset is None:
        torch.mul(codes, scale, out=target)
    else:
        torch.addcmul(offset, scale, codes, out=target)


# ---- words --------------------------------------------------------------------------------------


@cache
def _constants(values: tuple, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def _repeat(byte: int, size: int) -> int:
    """Return a word, signed unless it is a byte, that consists of equal bytes."""
    return int.from_bytes(bytes([byte]) * size, "little", signed=size > 1)


def _words(blocks: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return some bytes of each block as words that are as long as alignment allows."""
    size = gcd(blocks.shape[-1], start, stop, ALIGNMENT)
    return blocks.view(WORDS[size])[..., start // size : stop // size]


def _each(operation: Callable, words: torch.Tensor, values: Sequence[int]) -> torch.Tensor:
    """Apply an operation with each of some numbers, which become a new axis before the last one."""
    return operation(words.unsqueeze(-2), _constants(tuple(values), words.dtype, words.device)[:, None])


def _mask_each(words: torch.Tensor, masks: Sequence[int]) -> torch.Tensor:
    """Mask all bytes with each of some masks."""
    return _each(torch.bitwise_and, words, [_repeat(mask, words.itemsize) for mask in masks])


def _shift_each(words: torch.Tensor, shifts: Sequence[int], mask: int) -> torch.Tensor:
    """Shift all bytes to the right by each of some numbers of bits, then mask them."""
    shifted = _each(torch.bitwise_right_shift, words, shifts)
    return shifted.bitwise_and_(_repeat(mask, words.itemsize))


def _shift_bytes(numbers: torch.Tensor, shifts: Sequence[int], mask: int) -> torch.Tensor:
    """Return parts of each number, from low to high bits: (..., n) becomes (..., n · parts)."""
    parts = numbers.unsqueeze(-1) >> _constants(tuple(shifts), numbers.dtype, numbers.device)
    return parts.bitwise_and_(mask).flatten(-2)


def _insert(codes: torch.Tensor, bits: torch.Tensor, factors: Sequence[int]) -> torch.Tensor:
    """Add to codes, in place, bits that are to be multiplied by factors, one for each row of words."""
    return codes.addcmul_(bits, _constants(tuple(factors), codes.dtype, codes.device)[:, None])


def _scales(blocks: torch.Tensor, at: int, factors: Sequence[float] = (1.0,)) -> torch.Tensor:
    """Return a half float of each block as float32, multiplied by each of some powers of two."""
    half = blocks.view(torch.float16)[..., at // 2 : at // 2 + 1]
    return half * _constants(tuple(factors), torch.float32, blocks.device)


def _layout(scratch: float) -> Callable[[Callable[[torch.Tensor], Parts]], Callable[[torch.Tensor], Parts]]:
    """Register the layout of the type that a function is named after."""

    def register(parts: Callable[[torch.Tensor], Parts]) -> Callable[[torch.Tensor], Parts]:
        LAYOUTS[parts.__name__.upper().strip("_")] = Layout(parts, scratch)
        return parts

    return register


# ---- tables -------------------------------------------------------------------------------------


@cache
def _table(name: str, device: torch.device) -> torch.Tensor:
    """Return a table on a device."""
    return torch.from_numpy(TABLES[name]()).to(device)


def _look_up(name: str, index: torch.Tensor) -> torch.Tensor:
    """Return entries of a table. A negative index counts from its end."""
    return _table(name, index.device)[index.to(torch.int64)]


def _bytes_of_bits(clear: int, filled: int) -> np.ndarray:
    """Return for each byte a word of eight bytes, one for each bit."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits == 1, filled, clear).astype(np.uint8).view(np.int64)[:, 0]


def _signs7() -> np.ndarray:
    """Return the signs for seven bits: an eighth makes the number of ones even."""
    index = np.arange(128)
    parity = sum(index >> bit for bit in range(7)) & 1
    return _bytes_of_bits(1, 0xFF)[index | parity << 7]


def _values_of_nibbles(values: Sequence[int]) -> np.ndarray:
    """Return for each two bytes a word of four: the values of the nibbles of the first byte, then the second."""
    nibbles = np.arange(1 << 16)[:, None] >> np.array([0, 4, 8, 12]) & 15
    return np.array(values, np.int8)[nibbles].view(np.int32)[:, 0]


def _grid(name: str, factor: int = 1) -> np.ndarray:
    """Return the words of four or eight codes that a type chooses from."""
    import gguf.quants

    owner = getattr(gguf.quants, name)
    owner.init_grid()
    codes = (owner.grid.reshape(owner.grid_shape) * factor).astype(np.int8)
    return codes.view(np.int32 if codes.shape[1] == 4 else np.int64)[:, 0]


def _e8m0() -> np.ndarray:
    """Return half of the powers of two that a byte stands for."""
    return np.ldexp(np.float32(1), np.arange(256) - 128).astype(np.float32)


def _ue4m3() -> np.ndarray:
    """Return half of the numbers of four exponent bits and three others; the sign is ignored."""
    byte = np.arange(256)
    exponent, fraction = byte >> 3 & 15, byte & 7
    values = np.where(exponent == 0, np.ldexp(fraction, -10), np.ldexp(8 + fraction, exponent - 11))
    values[0x7F] = 0  # NaN
    return values.astype(np.float32)


TABLES: dict[str, Callable[[], np.ndarray]] = {
    "minus 16 unless set": lambda: _bytes_of_bits(0xF0, 0),
    "16 if set": lambda: _bytes_of_bits(0, 16),
    "1 if set, else -1": lambda: _bytes_of_bits(0xFF, 1),
    "-1 if set, else 1": lambda: _bytes_of_bits(1, 0xFF),
    "signs of 7 bits": _signs7,
    "IQ4": lambda: _values_of_nibbles(IQ4_VALUES),
    "E2M1": lambda: _values_of_nibbles(E2M1_VALUES),
    "E8M0": _e8m0,
    "UE4M3": _ue4m3,
    "IQ1": lambda: _grid("IQ1_S", 8),
    **{name: lambda name=name: _grid(name) for name in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")},  # type: ignore[misc]
}


# ---- blocks of 32 -------------------------------------------------------------------------------


@_layout(1.75)
def _q4_0(blocks: torch.Tensor) -> Parts:
    """Move each code to the high bits of a byte, whose highest is the sign."""
    flipped = (_words(blocks, 2, 18) ^ _repeat(0x88, 2)).view(torch.int64)
    codes = _each(torch.bitwise_left_shift, flipped, (4, 0)).bitwise_and_(_repeat(0xF0, 8))
    return codes.view(torch.int8).flatten(2), _scales(blocks, 0, [1 / 16]), None


@_layout(1.5)
def _q4_1(blocks: torch.Tensor) -> Parts:
    codes = _mask_each(_words(blocks, 4, 20), NIBBLES).view(torch.uint8)
    return codes, _scales(blocks, 0, [1, 1 / 16]).unsqueeze(-1), _scales(blocks, 2).unsqueeze(-1)


def _five_bits(blocks: torch.Tensor, at: int, table: str) -> torch.Tensor:
    """Return words of codes whose fifth bits, found in a table, precede the others."""
    low = _shift_each(_words(blocks, at + 4, at + 20), (0, 4), 0x0F)
    return low.flatten(2).view(torch.int64).bitwise_or_(_look_up(table, blocks[..., at : at + 4]))


@_layout(3)
def _q5_0(blocks: torch.Tensor) -> Parts:
    codes = _five_bits(blocks, 2, "minus 16 unless set")
    return codes.view(torch.int8), _scales(blocks, 0), None


@_layout(3)
def _q5_1(blocks: torch.Tensor) -> Parts:
    codes = _five_bits(blocks, 4, "16 if set")
    return codes.view(torch.uint8), _scales(blocks, 0), _scales(blocks, 2)


@_layout(0.25)
def _q8_0(blocks: torch.Tensor) -> Parts:
    return blocks[..., 2:].view(torch.int8), _scales(blocks, 0), None


def _nibble_values(table: str, words: torch.Tensor) -> torch.Tensor:
    """Return the values of words of two bytes: those of the low nibbles, then of the high ones."""
    values = _look_up(table, words).view(torch.int8)
    return values.unflatten(-1, (-1, 2)).transpose(-1, -2)


@_layout(3)
def _iq4_nl(blocks: torch.Tensor) -> Parts:
    return _nibble_values("IQ4", _words(blocks, 2, 18)), _scales(blocks, 0).unsqueeze(-1), None


@_layout(3.75)
def _mxfp4(blocks: torch.Tensor) -> Parts:
    words = _copy(blocks[..., 1:]).view(torch.int16)
    return _nibble_values("E2M1", words), _look_up("E8M0", blocks[..., :1]).unsqueeze(-1), None


# ---- blocks of 256 ------------------------------------------------------------------------------


def _scales_and_offsets(
    blocks: torch.Tensor, at: int, packed: torch.Tensor, factors: Sequence[float] = ()
) -> list[torch.Tensor]:
    """Multiply bytes (..., 2, n) by two half floats: scales, times powers of two, and negative offsets."""
    halves = blocks.view(torch.float16)[..., at // 2 : at // 2 + 2]
    halves = halves * _constants((1.0, -1.0), torch.float32, blocks.device)
    result = halves.new_empty(2, *packed.shape[:2], packed.shape[-1])
    torch.mul(packed, halves.unsqueeze(-1), out=result.movedim(0, 2))
    if factors:
        result[0].mul_(_constants(tuple(factors), torch.float32, blocks.device))
    return [result[0].unsqueeze(-1), result[1].unsqueeze(-1)]


@_layout(2.75)
def _q2_k(blocks: torch.Tensor) -> Parts:
    codes = _mask_each(_words(blocks, 16, 80).unflatten(-1, (2, -1)), PAIRS_OF_BITS).view(torch.uint8)
    packed = _shift_each(_words(blocks, 0, 16), (0, 4), 15).view(torch.uint8)
    factors = [4.0**-shift for shift in (0, 0, 1, 1, 2, 2, 3, 3)] * 2
    return codes.view(*codes.shape[:2], 16, 16), *_scales_and_offsets(blocks, 80, packed, factors)


@_layout(3)
def _q3_k(blocks: torch.Tensor) -> Parts:
    """Subtract four unless a bit is set: add 252 to a byte."""
    low = _shift_each(_words(blocks, 32, 96).unflatten(-1, (2, -1)), (0, 2, 4, 6), 3)
    clear = _words(blocks, 0, 32).bitwise_not().view(torch.int64)
    bits = _mask_each(_each(torch.bitwise_right_shift, clear, (0, 2, 4, 6)), (1, 2)).flatten(2, 3)
    codes = _insert(low.view(torch.int64).flatten(2, 3), bits, (252, 126) * 4)
    scales = _shift_each(_words(blocks, 96, 104), (0, 4), 15).flatten(2)
    scales.add_(_shift_each(_words(blocks, 104, 108), (0, 2, 4, 6), 3).flatten(2), alpha=16)
    scale = (scales.view(torch.int8) - 32) * _scales(blocks, 108)
    return codes.view(torch.int8).view(*codes.shape[:2], 16, 16), scale.unsqueeze(-1), None


def _k_scales(blocks: torch.Tensor, factors: Sequence[float] = ()) -> list[torch.Tensor]:
    """Return the scales and the negative offsets of Q4_K and Q5_K."""
    words = blocks.view(torch.int32)[..., 1:4]
    packed = words.new_empty(*words.shape[:2], 2, 2)
    torch.bitwise_and(words[..., :2], _repeat(63, 4), out=packed[..., 0])
    high = (words[..., :2] >> 2).bitwise_and_(_repeat(48, 4))
    torch.bitwise_or(_shift_each(words[..., 2:], (0, 4), 15).squeeze(-1), high, out=packed[..., 1])
    return _scales_and_offsets(blocks, 0, packed.view(torch.uint8), factors)


@_layout(2)
def _q4_k(blocks: torch.Tensor) -> Parts:
    codes = _mask_each(_words(blocks, 16, 144).unflatten(-1, (4, -1)), NIBBLES)
    return codes.view(torch.uint8).flatten(2, 3), *_k_scales(blocks, [1, 1 / 16] * 4)


@_layout(3)
def _q5_k(blocks: torch.Tensor) -> Parts:
    low = _shift_each(_words(blocks, 48, 176).unflatten(-1, (4, -1)), (0, 4), 15).flatten(2, 3)
    bits = _mask_each(_each(torch.bitwise_right_shift, _words(blocks, 16, 48), (0, 4)), BITS).flatten(2, 3)
    codes = _insert(low, bits, (16, 8, 4, 2) * 2)
    return codes.view(torch.uint8), *_k_scales(blocks)


@_layout(2.5)
def _q6_k(blocks: torch.Tensor) -> Parts:
    """Move each code to the high bits of a byte, whose highest is the sign."""
    source = _words(blocks, 0, 128).unflatten(-1, (2, -1))
    low = source.new_empty(*source.shape[:3], 2, source.shape[-1])
    torch.bitwise_left_shift(source, 2, out=low[..., 0, :])
    torch.bitwise_right_shift(source, 2, out=low[..., 1, :])
    codes = low.view(torch.int64).bitwise_and_(_repeat(0x3C, 8)).view(*low.shape[:3], 4, 4)
    flipped = (_words(blocks, 128, 192) ^ _repeat(0xAA, 2)).view(torch.int64).unflatten(-1, (2, -1))
    _insert(codes, _mask_each(flipped, PAIRS_OF_BITS), (64, 16, 4, 1))
    scale = blocks[..., 192:208].view(torch.int8) * _scales(blocks, 208, [1 / 4])
    return codes.view(torch.int8).view(*codes.shape[:2], 16, 16), scale.unsqueeze(-1), None


@_layout(0.125)
def _q8_k(blocks: torch.Tensor) -> Parts:
    """Leave out the sums of codes that only products need."""
    return blocks[..., 4:260].view(torch.int8), _copy(blocks[..., :4]).view(torch.float32), None


@_layout(3.25)
def _iq4_xs(blocks: torch.Tensor) -> Parts:
    codes = _nibble_values("IQ4", blocks.view(torch.int16)[..., 4:].unflatten(-1, (8, -1)))
    scales = _shift_bytes(blocks[..., 4:8], (0, 4), 15).view(torch.int8)
    high = _shift_bytes(blocks.view(torch.int16)[..., 1:2], range(0, 16, 2), 3)
    scale = (scales + 16 * high - 32) * _scales(blocks, 0)
    return codes, scale[..., None, None], None


# ---- grids --------------------------------------------------------------------------------------


def _signed(codes: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Return bytes of words (rows, blocks, n) that are multiplied by signs in words of eight bytes."""
    return codes.view(torch.int8).flatten(2) * signs.view(torch.int8).flatten(2)


def _odd(nibbles: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return scales that are multiplied by odd numbers: twice a number and one."""
    return ((2 * nibbles + 1) * scales).unsqueeze(-1)


def _index(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return indices of a low byte and some high bits."""
    return low.to(torch.int16).add_(high, alpha=256)


@_layout(3.5)
def _iq2_xxs(blocks: torch.Tensor) -> Parts:
    words = _copy(blocks[..., 2:]).view(torch.int32).unflatten(-1, (8, 2))
    index, rest = words[..., :1].view(torch.uint8).flatten(2), words[..., 1]
    signs = _look_up("signs of 7 bits", _shift_bytes(rest, (0, 7, 14, 21), 127))
    codes = _signed(_look_up("IQ2_XXS", index), signs).unflatten(-1, (8, 32))
    return codes, _odd(rest >> 28 & 15, _scales(blocks, 0, [1 / 8])), None


@_layout(3.5)
def _iq2_xs(blocks: torch.Tensor) -> Parts:
    words = blocks.view(torch.int16)[..., 1:33]
    signs = _look_up("signs of 7 bits", words >> 9 & 127)
    codes = _signed(_look_up("IQ2_XS", words & 511), signs).unflatten(-1, (16, 16))
    return codes, _odd(_shift_bytes(blocks[..., 66:74], (0, 4), 15), _scales(blocks, 0, [1 / 8])), None


@_layout(3.5)
def _iq2_s(blocks: torch.Tensor) -> Parts:
    index = _index(blocks[..., 2:34], _shift_bytes(blocks[..., 66:74], (0, 2, 4, 6), 3))
    signs = _look_up("-1 if set, else 1", blocks[..., 34:66])
    codes = _signed(_look_up("IQ2_S", index), signs).unflatten(-1, (16, 16))
    return codes, _odd(_shift_bytes(blocks[..., 74:82], (0, 4), 15), _scales(blocks, 0, [1 / 8])), None


@_layout(4.25)
def _iq3_xxs(blocks: torch.Tensor) -> Parts:
    rest = _copy(blocks[..., 66:98]).view(torch.int32)
    signs = _look_up("signs of 7 bits", _shift_bytes(rest, (0, 7, 14, 21), 127))
    codes = _signed(_look_up("IQ3_XXS", blocks[..., 2:66]), signs).unflatten(-1, (8, 32))
    return codes, _odd(rest >> 28 & 15, _scales(blocks, 0, [1 / 4])), None


@_layout(4.75)
def _iq3_s(blocks: torch.Tensor) -> Parts:
    index = _index(blocks[..., 2:66], _shift_bytes(blocks[..., 66:74], range(8), 1))
    signs = _look_up("-1 if set, else 1", blocks[..., 74:106])
    codes = _signed(_look_up("IQ3_S", index), signs).unflatten(-1, (8, 32))
    return codes, _odd(_shift_bytes(blocks[..., 106:110], (0, 4), 15), _scales(blocks, 0)), None


@_layout(2.5)
def _iq1_s(blocks: torch.Tensor) -> Parts:
    """Multiply by eight what is chosen from the grid, so that an eighth more or less is one more or less."""
    high = blocks.view(torch.int16)[..., 17:25]
    index = _index(blocks[..., 2:34], _shift_bytes(high, (0, 3, 6, 9), 7))
    codes = _look_up("IQ1", index).view(torch.int8).unflatten(-1, (8, 32))
    codes.add_(((high >> 15) * 2 + 1).to(torch.int8).unsqueeze(-1))
    return codes, _odd(high >> 12 & 7, _scales(blocks, 0, [1 / 8])), None


@_layout(2.5)
def _iq1_m(blocks: torch.Tensor) -> Parts:
    """Decode as IQ1_S. The scale of a block lies in the highest nibbles of four words."""
    high = _shift_bytes(blocks[..., 32:48], (0, 4), 15)
    codes = _look_up("IQ1", _index(blocks[..., :32], high & 7)).view(torch.int8).unflatten(-1, (32, 8))
    codes.add_((1 - (high >> 3).view(torch.int8) * 2).unsqueeze(-1))
    words = blocks.view(torch.int16)[..., 24:28]
    nibbles = (words >> 12 & 15) << _constants((0, 4, 8, 12), torch.int16, blocks.device)
    scale = nibbles.sum(-1, keepdim=True, dtype=torch.int32).to(torch.int16).view(torch.float16)
    odd = _odd(_shift_bytes(words, (0, 3, 6, 9), 7), scale.float() / 8)
    return codes.flatten(2).unflatten(-1, (16, 16)), odd, None


# ---- others -------------------------------------------------------------------------------------


@_layout(5.25)
def _tq1_0(blocks: torch.Tensor) -> Parts:
    """Find the digits to base three of fractions: multiply them, modulo one, and take the whole part."""
    powers = _constants((1, 3, 9, 27, 81), torch.uint8, blocks.device)[:, None]
    first, second, last = (blocks[..., lo:hi].unsqueeze(-2) for lo, hi in ((0, 32), (32, 48), (48, 52)))
    fractions = [(first * powers).flatten(2), (second * powers).flatten(2), (last * powers[:4]).flatten(2)]
    digits = torch.cat(fractions, -1).to(torch.int16).mul_(3) >> 8
    return digits.to(torch.int8).sub_(1), _scales(blocks, 52), None


@_layout(1.25)
def _tq2_0(blocks: torch.Tensor) -> Parts:
    codes = _shift_each(_words(blocks, 0, 64).unflatten(-1, (2, -1)), (0, 2, 4, 6), 3)
    return codes.view(torch.int8).flatten(2).sub_(1), _scales(blocks, 64), None


@_layout(3.25)
def _nvfp4(blocks: torch.Tensor) -> Parts:
    codes = _nibble_values("E2M1", blocks.view(torch.int16)[..., 2:].unflatten(-1, (4, -1)))
    return codes, _look_up("UE4M3", blocks[..., :4])[..., None, None], None


@_layout(2.25)
def _q1_0(blocks: torch.Tensor) -> Parts:
    return _look_up("1 if set, else -1", blocks[..., 2:]).view(torch.int8), _scales(blocks, 0), None
