"""The innermost loops of matrix products, written in LLVM's own words so that sums surely stay in registers.

Everything here works on *tiles*: 16 x 16 words of 32 bits, 1 KB. A word is one float32, or two bf16 that follow each other
along k. A tile of the left operand has a row for each of 16 rows of A; a tile of the right one has a row for each of 16
words along k, with the 16 columns of B beside each other. That is what the tile unit (AMX) wants, and it suits vectors too.
A *panel* is a run of tiles along k.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from llamatrain.machine import units

TILE = 1024  # bytes
ROW = 64  # bytes of a tile's row
STEP = 4  # words along k in one turn of the vector kernels' loop

# Rows of C that a vector kernel holds, 32 or 16 columns wide: sums take half the registers, what feeds them the rest.
SUMS = 16 if units.floats() == 16 else 8
WIDE_ROWS = max(1, SUMS * units.floats() // 32)
NARROW_ROWS = 2 * WIDE_ROWS


class BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


VOID, BYTE, SHORT, INT, LONG, FLOAT = ir.VoidType(), *(ir.IntType(bits) for bits in (8, 16, 32, 64)), ir.FloatType()
INTS, FLOATS, SHORTS = (ir.VectorType(element, 16) for element in (INT, FLOAT, SHORT))
PAIRS = ir.VectorType(BFloat(), 32)
POINTER = BYTE.as_pointer()
FUSED = ("contract",)  # a product and a sum may become one instruction


def intrinsic_call(builder: Any, name: str, gives: Any, *values: Any) -> Any:
    kind = ir.FunctionType(gives, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def load(builder: Any, address: Any, kind: Any, align: int) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def store(builder: Any, value: Any, address: Any, align: int) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def plus(builder: Any, address: Any, offset: int) -> Any:
    return builder.add(address, LONG(offset)) if offset else address


def prefetch(builder: Any, address: Any) -> None:
    """Ask for a line that will be written: stores that miss wait for each other, these do not."""
    intrinsic_call(builder, "llvm.prefetch.p0", VOID, builder.inttoptr(address, POINTER), INT(1), INT(3), INT(1))


def splat(builder: Any, value: Any) -> Any:
    kind = ir.VectorType(value.type, 16)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, INT(0))
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), ir.Constant(INTS, [0] * 16))


# ---- C[rows, 16 * vectors] (+)= A B, by vectors ------------------------------------------------

Emit = Callable[..., None]


def multiply_add(builder: Any, total: Any, a: Any, b: Any, pairs: bool) -> Any:
    """total + a * b for 16 words at once; a is one word."""
    if pairs:
        left = builder.bitcast(splat(builder, a), PAIRS)
        return intrinsic_call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total, left, builder.bitcast(b, PAIRS))
    left = splat(builder, builder.bitcast(a, FLOAT))
    return builder.fadd(total, builder.fmul(left, builder.bitcast(b, FLOATS), flags=FUSED), flags=FUSED)


def vector_kernel(rows: int, vectors: int, pairs: bool) -> Emit:
    def emit(builder: Any, c: Any, ldc: Any, a: Any, b: Any, panel: Any, words: Any, accumulate: Any) -> None:
        places = [plus(builder, builder.add(c, builder.mul(ldc, LONG(i))), ROW * j) for i in range(rows) for j in range(vectors)]
        columns = [builder.add(b, builder.mul(panel, LONG(j))) for j in range(vectors)]
        for place in places:
            prefetch(builder, place)
        enter = builder.append_basic_block("start")
        builder.cbranch(builder.icmp_signed("!=", accumulate, LONG(0)), more := builder.append_basic_block("more"), enter)
        before = builder.block
        builder.position_at_end(more)
        held = [load(builder, place, FLOATS, 4) for place in places]
        builder.branch(enter)

        builder.position_at_end(enter)
        first = []
        for value in held:
            first.append(builder.phi(FLOATS))
            first[-1].add_incoming(value, more)
            first[-1].add_incoming(ir.Constant(FLOATS, [0.0] * 16), before)
        loop, done = builder.append_basic_block("loop"), builder.append_basic_block("done")
        builder.branch(loop)

        builder.position_at_end(loop)
        word, *totals = (builder.phi(kind) for kind in (LONG, *[FLOATS] * len(places)))
        word.add_incoming(LONG(0), enter)
        for total, value in zip(totals, first, strict=True):
            total.add_incoming(value, enter)
        # word w of A stands in tile w // 16 at w % 16 of each row; in B simply at row w
        within = builder.shl(builder.and_(word, LONG(15)), LONG(2))
        left = builder.add(a, builder.add(builder.shl(builder.and_(word, LONG(-16)), LONG(6)), within))
        down = builder.shl(word, LONG(6))
        sums = list(totals)
        for step in range(STEP):
            right = [load(builder, plus(builder, builder.add(column, down), ROW * step), INTS, 64) for column in columns]
            for i in range(rows):
                one = load(builder, plus(builder, left, ROW * i + 4 * step), INT, 4)
                for j in range(vectors):
                    sums[i * vectors + j] = multiply_add(builder, sums[i * vectors + j], one, right[j], pairs)
        following = builder.add(word, LONG(STEP))
        for total, value in zip((word, *totals), (following, *sums), strict=True):
            total.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, words), loop, done)

        builder.position_at_end(done)
        for place, value in zip(places, sums, strict=True):
            store(builder, value, place, 4)

    return emit


# ---- C[32, 32] (+)= A B, by the tile unit ------------------------------------------------------

# tiles 0 to 3 are C's quarters, 4 and 5 rows of A, 6 and 7 columns of B
QUARTERS = ((0, 4, 6), (1, 4, 7), (2, 5, 6), (3, 5, 7))


def tile_kernel(builder: Any, c: Any, ldc: Any, a: Any, a_panel: Any, b: Any, b_panel: Any, words: Any, accumulate: Any) -> None:
    def tile(name: str, number: int, *values: Any) -> None:
        intrinsic_call(builder, f"llvm.x86.{name}", VOID, BYTE(number), *values)

    def at(address: Any) -> Any:
        return builder.inttoptr(address, POINTER)

    a2, b2, lower = builder.add(a, a_panel), builder.add(b, b_panel), builder.add(c, builder.shl(ldc, LONG(4)))
    corners = [c, plus(builder, c, ROW), lower, plus(builder, lower, ROW)]
    with builder.if_else(builder.icmp_signed("!=", accumulate, LONG(0))) as (more, anew):
        with more:
            for quarter, corner in enumerate(corners):
                tile("tileloadd64", quarter, at(corner), ldc)
        with anew:
            for quarter in range(4):
                tile("tilezero", quarter)
    with cgutils.for_range(builder, builder.ashr(plus(builder, words, 15), LONG(4))) as loop:
        offset = builder.shl(loop.index, LONG(10))
        for number, panel in zip((4, 6, 7, 5), (a, b, b2, a2), strict=True):
            tile("tileloadd64", number, at(builder.add(panel, offset)), LONG(ROW))
        for quarter, left, right in QUARTERS:
            tile("tdpbf16ps", quarter, BYTE(left), BYTE(right))
    for quarter, corner in enumerate(corners):
        tile("tilestored64", quarter, at(corner), ldc)


def configure(builder: Any) -> None:
    """Eight tiles of 16 rows of 64 bytes."""
    palette, bytes_in_row, rows = [1] + [0] * 15, [ROW, 0] * 8 + [0] * 16, [16] * 8 + [0] * 8
    words = ir.Constant(ir.VectorType(BYTE, 64), palette + bytes_in_row + rows)
    place = cgutils.alloca_once(builder, words.type)
    builder.store(words, place, align=1)
    intrinsic_call(builder, "llvm.x86.ldtilecfg", VOID, builder.bitcast(place, POINTER))


def release(builder: Any) -> None:
    intrinsic_call(builder, "llvm.x86.tilerelease", VOID)


# ---- a row of a tile from 16 or 32 elements ----------------------------------------------------


def rounded(builder: Any, values: Any) -> Any:
    """16 float32 as words whose upper half is the nearest bf16, even when halfway; NaN stays NaN. The lower half is noise."""
    bits = builder.bitcast(values, INTS)
    each = lambda number: ir.Constant(INTS, [number] * 16)
    odd = builder.and_(builder.lshr(bits, each(16)), each(1))
    nearest = builder.add(builder.add(bits, each(0x7FFF)), odd)
    quiet = builder.or_(bits, each(0x400000))
    return builder.select(builder.fcmp_unordered("uno", values, values), quiet, nearest)


def lower_half(builder: Any, words: Any) -> Any:
    return builder.lshr(words, ir.Constant(INTS, [16] * 16))


def upper_half(builder: Any, words: Any) -> Any:
    return builder.and_(words, ir.Constant(INTS, [0xFFFF0000] * 16))


def copy_row(builder: Any, to: Any, source: Any, second: Any) -> None:
    store(builder, load(builder, source, INTS, 2), to, 64)


def round_row(builder: Any, to: Any, source: Any, second: Any) -> None:
    store(builder, upper_half(builder, rounded(builder, load(builder, source, FLOATS, 4))), to, 64)


def widen_row(builder: Any, to: Any, source: Any, second: Any) -> None:
    halves = builder.zext(load(builder, source, SHORTS, 2), INTS)
    store(builder, builder.shl(halves, ir.Constant(INTS, [16] * 16)), to, 64)


def narrow_row(builder: Any, to: Any, source: Any, second: Any) -> None:
    """32 float32 along k to 16 pairs."""
    for part in range(2):
        words = rounded(builder, load(builder, plus(builder, source, ROW * part), FLOATS, 4))
        store(builder, builder.trunc(lower_half(builder, words), SHORTS), plus(builder, to, ROW // 2 * part), 32)


def pair_floats(builder: Any, to: Any, source: Any, second: Any) -> None:
    """16 float32 and the 16 that follow them along k, a row further."""
    low, high = (rounded(builder, load(builder, address, FLOATS, 4)) for address in (source, second))
    store(builder, builder.or_(lower_half(builder, low), upper_half(builder, high)), to, 64)


def pair_halves(builder: Any, to: Any, source: Any, second: Any) -> None:
    low, high = (builder.zext(load(builder, address, SHORTS, 2), INTS) for address in (source, second))
    store(builder, builder.or_(low, builder.shl(high, ir.Constant(INTS, [16] * 16))), to, 64)


# ---- what does not fill a vector ---------------------------------------------------------------


def first_of(builder: Any, count: Any) -> Any:
    """A mask of the first `count` of 32."""
    lanes = ir.VectorType(INT, 32)
    one = builder.insert_element(ir.Constant(lanes, ir.Undefined), builder.trunc(count, INT), INT(0))
    everywhere = builder.shuffle_vector(one, one, ir.Constant(lanes, [0] * 32))
    return builder.icmp_signed("<", ir.Constant(lanes, list(range(32))), everywhere)


def masked_load(builder: Any, address: Any, element: Any, mask: Any) -> Any:
    kind, size = ir.VectorType(element, 32), 2 if element == SHORT else 4
    name = f"llvm.masked.load.v32{'i16' if size == 2 else 'f32'}.p0"
    zero = ir.Constant(kind, [0 if size == 2 else 0.0] * 32)
    return intrinsic_call(builder, name, kind, builder.inttoptr(address, kind.as_pointer()), INT(size), mask, zero)


def part(element: Any) -> Emit:
    """A row of 32 elements of which only some are there to be read; zeros for the rest."""

    def emit(builder: Any, to: Any, source: Any, count: Any) -> None:
        store(builder, masked_load(builder, source, element, first_of(builder, count)), to, 64)

    return emit


def settle_row(builder: Any, c: Any, source: Any, count: Any, accumulate: Any) -> None:
    """Up to 32 finished sums to a row of C."""
    mask, kind = first_of(builder, count), ir.VectorType(FLOAT, 32)
    wanted = first_of(builder, builder.select(builder.icmp_signed("!=", accumulate, LONG(0)), count, LONG(0)))
    value = builder.fadd(masked_load(builder, c, FLOAT, wanted), load(builder, source, kind, 64))
    place = builder.inttoptr(c, kind.as_pointer())
    intrinsic_call(builder, "llvm.masked.store.v32f32.p0", VOID, value, place, INT(4), mask)


# ---- a tile's transpose ------------------------------------------------------------------------

# Which words of two vectors (0 to 15, 16 to 31) make a new one, in quarters of four words.
INTERLEAVED = [[4 * lane + w for lane in range(4) for w in words] for words in ((0, 16, 1, 17), (2, 18, 3, 19))]
BY_TWO = [[4 * lane + w for lane in range(4) for w in words] for words in ((0, 1, 16, 17), (2, 3, 18, 19))]
QUARTER = [[4 * lane + w for lane in lanes for w in range(4)] for lanes in ((0, 2, 4, 6), (1, 3, 5, 7))]


def turn(builder: Any, tile: Any) -> None:
    """Transpose a tile where it stands: its 4 x 4 blocks of words, then the blocks."""

    def mix(low: Any, high: Any, picks: list[int]) -> Any:
        return builder.shuffle_vector(low, high, ir.Constant(INTS, picks))

    rows = [load(builder, plus(builder, tile, ROW * i), INTS, 64) for i in range(16)]
    for first in range(0, 16, 4):
        upper, lower = ([mix(rows[i], rows[i + 1], picks) for picks in INTERLEAVED] for i in (first, first + 2))
        rows[first : first + 4] = [mix(upper[i], lower[i], picks) for i in range(2) for picks in BY_TWO]
    for first in range(4):
        upper, lower = ([mix(rows[i], rows[i + 4], picks) for picks in QUARTER] for i in (first, first + 8))
        rows[first::4] = [mix(upper[i], lower[i], picks) for picks in QUARTER for i in range(2)]
    for i, row in enumerate(rows):
        store(builder, row, plus(builder, tile, ROW * i), 64)


# ---- as Numba calls them: addresses and distances are integers, in bytes ------------------------


def vectors(rows: int, count: int, pairs: bool) -> Any:
    """`(c, ldc, a, b, panel, words, accumulate)`; panel: from 16 columns of B to the next."""
    emit = vector_kernel(rows, count, pairs)

    @intrinsic
    def call(context: Any, c: Any, ldc: Any, a: Any, b: Any, panel: Any, words: Any, accumulate: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            if not pairs or "avx512bf16" in units.units():
                emit(builder, *values)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return call


float_wide, float_narrow = vectors(WIDE_ROWS, 2, pairs=False), vectors(NARROW_ROWS, 1, pairs=False)
pair_wide, pair_narrow = vectors(WIDE_ROWS, 2, pairs=True), vectors(NARROW_ROWS, 1, pairs=True)


@intrinsic
def tiles(context: Any, c: Any, ldc: Any, a: Any, a_panel: Any, b: Any, b_panel: Any, words: Any, accumulate: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if "amx" in units.units():
            tile_kernel(builder, *values)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 8), generate


def switch(emit: Emit) -> Any:
    @intrinsic
    def call(context: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            if "amx" in units.units():
                emit(builder)
            return context.get_dummy_value()

        return types.void(), generate

    return call


tiles_on, tiles_off = switch(configure), switch(release)


def row(emit: Emit) -> Any:
    """`(to, source, second or count)`"""

    @intrinsic
    def call(context: Any, to: Any, source: Any, second: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            emit(builder, *values)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), generate

    return call


copy, round_floats, widen, narrow = row(copy_row), row(round_row), row(widen_row), row(narrow_row)
pair, pair_up = row(pair_floats), row(pair_halves)
some_floats, some_halves = row(part(FLOAT)), row(part(SHORT))


@intrinsic
def settle(context: Any, c: Any, source: Any, count: Any, accumulate: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        settle_row(builder, *values)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic
def turn_tile(context: Any, tile: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        turn(builder, values[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def room(context: Any) -> Any:
    """The address of 4 KB of this call's own, for what does not fill 32 x 32."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        space = cgutils.alloca_once(builder, ir.ArrayType(BYTE, 4 * TILE))
        space.align = ROW
        return builder.ptrtoint(space, LONG)

    return types.int64(), generate
