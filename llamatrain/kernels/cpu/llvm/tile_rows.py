"""Rows of tiles (microkernel.py) from 16 or 32 elements, with LLVM's builder, and the transpose of a tile."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llamatrain.compiler.simd import llvm_ops as W
from llamatrain.compiler.simd.llvm_ops import FLOAT, INT, LONG, SHORT, load, store
from llamatrain.kernels.cpu.llvm.microkernel import FLOATS, INTS, PAIRS, add_offset, prefetch
from llamatrain.kernels.cpu.tile_shape import ROW
from llamatrain.platform import cpu

SHORTS, HALVES, LANES = ir.VectorType(SHORT, 16), ir.VectorType(SHORT, 32), ir.VectorType(INT, 32)
Emit = Callable[[Any, Any, Any, Any], None]


def interleaved(first: int, second: int) -> list[int]:
    """Return the indices of two runs of 16 elements, alternating."""
    return [at + i for i in range(16) for at in (first, second)]


def copy_row(builder: Any, to: Any, source: Any, second: Any) -> None:
    """Copy 16 words."""
    store(builder, load(builder, source, INTS, 2), to, 64)


def round_row(builder: Any, to: Any, source: Any, second: Any) -> None:
    """Round 16 float32 to bf16, kept as float32."""
    store(
        builder,
        W.upper_half(builder, W.round_to_upper_half(builder, load(builder, source, FLOATS, 4))),
        to,
        64,
    )


def widen_row(builder: Any, to: Any, source: Any, second: Any) -> None:
    """Convert 16 bf16 to float32."""
    store(builder, W.widen_to_upper_half(builder, load(builder, source, SHORTS, 2)), to, 64)


def round_both(builder: Any, first: Any, second: Any) -> Any:
    """Round 16 float32 from each address to 32 bf16. The unit takes denormals as zero, as products do."""
    low, high = (load(builder, address, FLOATS, 4) for address in (first, second))
    if "avx512bf16" in cpu.enabled_units():
        return builder.bitcast(
            W.call(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", PAIRS, high, low), HALVES
        )
    return builder.shuffle_vector(
        W.to_bf16(builder, low), W.to_bf16(builder, high), ir.Constant(LANES, list(range(32)))
    )


def narrow_row(builder: Any, to: Any, source: Any, second: Any) -> None:
    """Round 32 float32 along k to 16 pairs."""
    store(builder, round_both(builder, source, add_offset(builder, source, ROW)), to, 64)


def pair_floats(builder: Any, to: Any, source: Any, second: Any) -> None:
    """Round 16 float32 and their 16 neighbors along k, one row further, to pairs."""
    made = round_both(builder, source, second)
    store(builder, builder.shuffle_vector(made, made, ir.Constant(LANES, interleaved(0, 16))), to, 64)


def pair_two_tiles(builder: Any, to: Any, source: Any, second: Any, next_to: Any) -> None:
    """Pair 32 bf16 with their 32 neighbors along k: a row of this tile and one of the next."""
    ahead = builder.mul(
        builder.sub(second, source), LONG(32)
    )  # the next tile along k: the hardware does not prefetch distant rows
    for address in (source, second):
        prefetch(builder, builder.add(address, ahead), writing=0)
    low, high = (load(builder, address, HALVES, 2) for address in (source, second))
    for target, first in ((to, 0), (next_to, 16)):
        store(
            builder,
            builder.shuffle_vector(low, high, ir.Constant(LANES, interleaved(first, first + 32))),
            target,
            64,
        )


def pair_halves(builder: Any, to: Any, source: Any, second: Any) -> None:
    """Pair 16 bf16 with their 16 neighbors along k."""
    low, high = (load(builder, address, SHORTS, 2) for address in (source, second))
    store(builder, builder.or_(builder.zext(low, INTS), W.widen_to_upper_half(builder, high)), to, 64)


def copy_part(element: Any) -> Emit:
    """Return the emitter of a row of 32 elements of which only some are read; others are zero."""
    kind, size = ir.VectorType(element, 32), 2 if element == SHORT else 4

    def emit(builder: Any, to: Any, source: Any, count: Any) -> None:
        store(builder, W.masked_load(builder, source, kind, size, W.first_lanes(builder, count, 32)), to, 64)

    return emit


# ---- a tile's transpose ------------------------------------------------------------------------

# The words of two vectors (0 to 15, 16 to 31) that form a new one, in quarters of four words.
INTERLEAVED = [
    [4 * lane + w for lane in range(4) for w in words] for words in ((0, 16, 1, 17), (2, 18, 3, 19))
]
BY_TWO = [[4 * lane + w for lane in range(4) for w in words] for words in ((0, 1, 16, 17), (2, 3, 18, 19))]
QUARTER = [[4 * lane + w for lane in lanes for w in range(4)] for lanes in ((0, 2, 4, 6), (1, 3, 5, 7))]


def transpose(builder: Any, tile: Any) -> None:
    """Transpose a tile in place: its 4 x 4 blocks of words, then the blocks."""

    def mix(low: Any, high: Any, picks: list[int]) -> Any:
        return builder.shuffle_vector(low, high, ir.Constant(INTS, picks))

    rows = [load(builder, add_offset(builder, tile, ROW * i), INTS, 64) for i in range(16)]
    for first in range(0, 16, 4):
        upper, lower = (
            [mix(rows[i], rows[i + 1], picks) for picks in INTERLEAVED] for i in (first, first + 2)
        )
        rows[first : first + 4] = [mix(upper[i], lower[i], picks) for i in range(2) for picks in BY_TWO]
    for first in range(4):
        upper, lower = ([mix(rows[i], rows[i + 4], picks) for picks in QUARTER] for i in (first, first + 8))
        rows[first::4] = [mix(upper[i], lower[i], picks) for picks in QUARTER for i in range(2)]
    for i, row in enumerate(rows):
        store(builder, row, add_offset(builder, tile, ROW * i), 64)


# ---- as Numba calls them: addresses and distances are integers, in bytes ------------------------


def define_row(emit: Emit) -> Any:
    """Return an intrinsic `(to, source, second or count)`."""

    @intrinsic
    def call(context: Any, to: Any, source: Any, second: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            emit(builder, *values)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), generate

    return call


copy = define_row(copy_row)
round_floats = define_row(round_row)
widen = define_row(widen_row)
narrow = define_row(narrow_row)
pair, pair_up = define_row(pair_floats), define_row(pair_halves)
some_floats, some_halves = define_row(copy_part(FLOAT)), define_row(copy_part(SHORT))


@intrinsic
def pair_both(context: Any, to: Any, source: Any, second: Any, next_to: Any) -> Any:
    """Pair 32 bf16 with their neighbors along k into two tiles."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pair_two_tiles(builder, *values)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def transpose_tile(context: Any, tile: Any) -> Any:
    """Transpose a tile in place."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        transpose(builder, values[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate
