"""The inner loops of matrix products, written with LLVM's builder so that sums stay in registers.

Operands are *tiles*: 16 x 16 words of 32 bits, 1 KB. A word is one float32, or two bf16 that are neighbors
along k. A tile of the left operand has a row for each of 16 rows of A; a tile of the right one has a row for
each of 16 words along k, with the 16 columns of B next to each other. The tile unit (AMX) requires that, and
it suits vectors, too. A *panel* is a sequence of tiles along k.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from llamatrain.compiler.simd import llvm_ops as W
from llamatrain.compiler.simd.llvm_ops import BYTE, FLOAT, INT, LONG, POINTER, VOID, load, store
from llamatrain.kernels.cpu.tile_shape import COLUMNS, LAST_ROWS, NARROW_ROWS, ROW, ROWS, TILE
from llamatrain.platform import cpu

STEP = 4  # words along k in one iteration of the vector kernels


class BFloat(ir.Type):
    """LLVM's bfloat type, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


INTS, FLOATS = (ir.VectorType(element, 16) for element in (INT, FLOAT))
PAIRS = ir.VectorType(BFloat(), 32)
FUSED = ("contract",)  # a product and a sum may become one fused instruction


def add_offset(builder: Any, address: Any, offset: int) -> Any:
    """Add a constant to an address."""
    return builder.add(address, LONG(offset)) if offset else address


def allocate_scratch(builder: Any, size: int) -> Any:
    """Return the address of uninitialized bytes on the stack; Numba's own way would zero them each time."""
    with builder.goto_entry_block():
        space = builder.alloca(ir.ArrayType(BYTE, size))
    space.align = ROW
    return builder.ptrtoint(space, LONG)


def prefetch(builder: Any, address: Any, writing: int = 1) -> None:
    """Prefetch a cache line that will be written, or read.

    Stores that miss the cache wait for each other; prefetches do not.
    """
    W.call(
        builder, "llvm.prefetch.p0", VOID, builder.inttoptr(address, POINTER), INT(writing), INT(3), INT(1)
    )


# ---- C[rows, 16 * vectors] (+)= A B, by vectors ------------------------------------------------


def multiply_add(builder: Any, total: Any, a: Any, b: Any, pairs: bool) -> Any:
    """Return total + a * b for 16 words; a is one word."""
    if pairs:
        left = builder.bitcast(W.splat(builder, a, INTS), PAIRS)
        return W.call(
            builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, total, left, builder.bitcast(b, PAIRS)
        )
    left = W.splat(builder, builder.bitcast(a, FLOAT), FLOATS)
    return builder.fadd(total, builder.fmul(left, builder.bitcast(b, FLOATS), flags=FUSED), flags=FUSED)


def initial_sums(builder: Any, addresses: list[Any], accumulate: Any) -> list[Any]:
    """Return the contents of C, or zeros if it is overwritten."""
    enter = builder.append_basic_block("start")
    builder.cbranch(
        builder.icmp_signed("!=", accumulate, LONG(0)), more := builder.append_basic_block("more"), enter
    )
    before = builder.block
    builder.position_at_end(more)
    held = [load(builder, place, FLOATS, 4) for place in addresses]
    builder.branch(enter)
    builder.position_at_end(enter)
    first = [builder.phi(FLOATS) for _ in addresses]
    for made, value in zip(first, held, strict=True):
        made.add_incoming(value, more)
        made.add_incoming(W.constant(FLOATS, 0.0), before)
    return first


@dataclass(frozen=True)
class VectorKernel:
    """Emits the product of `rows` rows and 16 * `vectors` columns."""

    rows: int
    vectors: int
    pairs: bool

    def emit(
        self, builder: Any, c: Any, ldc: Any, a: Any, b: Any, panel: Any, words: Any, accumulate: Any
    ) -> None:
        """Emit the whole kernel."""
        rows, vectors = range(self.rows), range(self.vectors)
        places = [
            add_offset(builder, builder.add(c, builder.mul(ldc, LONG(i))), ROW * j)
            for i in rows
            for j in vectors
        ]
        columns = [builder.add(b, builder.mul(panel, LONG(j))) for j in vectors]
        for place in places:
            prefetch(builder, place)
        sums = self.emit_loop(builder, initial_sums(builder, places, accumulate), a, columns, words)
        for place, value in zip(places, sums, strict=True):
            store(builder, value, place, 4)

    def emit_loop(self, builder: Any, first: list[Any], a: Any, columns: list[Any], words: Any) -> list[Any]:
        """Emit the loop over k, STEP words at a time."""
        enter = builder.block
        loop = builder.append_basic_block("loop")
        done = builder.append_basic_block("done")
        builder.branch(loop)
        builder.position_at_end(loop)
        word, *totals = (builder.phi(kind) for kind in (LONG, *[FLOATS] * len(first)))
        for phi, value in zip((word, *totals), (LONG(0), *first), strict=True):
            phi.add_incoming(value, enter)
        sums = self.emit_step(builder, totals, a, columns, word)
        following = builder.add(word, LONG(STEP))
        for phi, value in zip((word, *totals), (following, *sums), strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, words), loop, done)
        builder.position_at_end(done)
        return sums

    def emit_step(self, builder: Any, totals: list[Any], a: Any, columns: list[Any], word: Any) -> list[Any]:
        """Emit one iteration and return the new sums."""
        # word w of A is in tile w // 16 at w % 16 of each row; of B, it is row w
        within = builder.shl(builder.and_(word, LONG(15)), LONG(2))
        left = builder.add(a, builder.add(builder.shl(builder.and_(word, LONG(-16)), LONG(6)), within))
        down, sums = builder.shl(word, LONG(6)), list(totals)
        for step in range(STEP):
            right = [
                load(builder, add_offset(builder, builder.add(column, down), ROW * step), INTS, 64)
                for column in columns
            ]
            for i in range(self.rows):
                one = load(builder, add_offset(builder, left, ROW * i + 4 * step), INT, 4)
                for j in range(self.vectors):
                    at = i * self.vectors + j
                    sums[at] = multiply_add(builder, sums[at], one, right[j], self.pairs)
        return sums


# ---- C[32, 32] (+)= A B, by the tile unit ------------------------------------------------------

# tiles 0 to 3 are C's quarters, 4 and 5 rows of A, 6 and 7 columns of B
QUARTERS = ((0, 4, 6), (1, 4, 7), (2, 5, 6), (3, 5, 7))


def emit_tile(builder: Any, name: str, number: int, *values: Any) -> None:
    """Emit an instruction of the tile unit for one tile."""
    W.call(builder, f"llvm.x86.{name}", VOID, BYTE(number), *values)


def pointer_to(builder: Any, address: Any) -> Any:
    """Return an address as a pointer."""
    return builder.inttoptr(address, POINTER)


def find_corners(builder: Any, c: Any, ldc: Any) -> list[Any]:
    """Return pointers to the quarters of C."""
    lower = builder.add(c, builder.shl(ldc, LONG(4)))
    corners = [c, add_offset(builder, c, ROW), lower, add_offset(builder, lower, ROW)]
    return [pointer_to(builder, corner) for corner in corners]


def emit_dots(builder: Any, dot: str, a: Any, a_panel: Any, b: Any, b_panel: Any) -> None:
    """Emit the products of two tiles of A and two of B; `dot` is the instruction."""
    a2, b2 = builder.add(a, a_panel), builder.add(b, b_panel)
    for number, address in zip((4, 6, 7, 5), (a, b, b2, a2), strict=True):
        emit_tile(builder, "tileloadd64", number, pointer_to(builder, address), LONG(ROW))
    for quarter, left, right in QUARTERS:
        emit_tile(builder, dot, quarter, BYTE(left), BYTE(right))


def emit_store_tiles(builder: Any, c: Any, ldc: Any) -> None:
    """Store the quarters of C."""
    for quarter, corner in enumerate(find_corners(builder, c, ldc)):
        emit_tile(builder, "tilestored64", quarter, corner, ldc)


def emit_zero_tiles(builder: Any) -> None:
    """Set the quarters to zero."""
    for quarter in range(4):
        emit_tile(builder, "tilezero", quarter)


def emit_tile_kernel(
    builder: Any, c: Any, ldc: Any, a: Any, a_panel: Any, b: Any, b_panel: Any, words: Any, accumulate: Any
) -> None:
    """Emit the product of 32 rows and 32 columns of bf16 by the tile unit."""
    awake = pointer_to(builder, allocate_scratch(builder, TILE))
    with builder.if_else(builder.icmp_signed("!=", accumulate, LONG(0))) as (more, anew):
        with more:
            for quarter, corner in enumerate(find_corners(builder, c, ldc)):
                emit_tile(builder, "tileloadd64", quarter, corner, ldc)
        with anew:
            emit_zero_tiles(builder)
    with cgutils.for_range(builder, builder.ashr(add_offset(builder, words, 15), LONG(4))) as loop:
        offset = builder.shl(loop.index, LONG(10))
        emit_dots(builder, "tdpbf16ps", builder.add(a, offset), a_panel, builder.add(b, offset), b_panel)
        # a dummy store: after some 1,800 cycles without one, the next takes 1,000
        emit_tile(builder, "tilestored64", 4, awake, LONG(ROW))
    emit_store_tiles(builder, c, ldc)


def emit_add_byte_products(builder: Any, a: Any, a_panel: Any, b: Any, b_panel: Any) -> None:
    """Add the products of two tiles of A and two of B to the quarters."""
    emit_dots(builder, "tdpbusd", a, a_panel, b, b_panel)


def emit_configure(builder: Any) -> None:
    """Configure eight tiles of 16 rows of 64 bytes."""
    palette, bytes_in_row, rows = [1] + [0] * 15, [ROW, 0] * 8 + [0] * 16, [16] * 8 + [0] * 8
    words = ir.Constant(ir.VectorType(BYTE, 64), palette + bytes_in_row + rows)
    place = cgutils.alloca_once(builder, words.type)
    builder.store(words, place, align=1)
    W.call(builder, "llvm.x86.ldtilecfg", VOID, builder.bitcast(place, POINTER))


def emit_release(builder: Any) -> None:
    """Release the tile unit."""
    W.call(builder, "llvm.x86.tilerelease", VOID)


# ---- what does not fill a vector ---------------------------------------------------------------


def emit_store_row(builder: Any, c: Any, source: Any, count: Any) -> None:
    """Store up to 32 finished sums in a row of C."""
    mask, kind = W.first_lanes(builder, count, 32), ir.VectorType(FLOAT, 32)
    W.masked_store(builder, load(builder, source, kind, 64), c, 4, mask)


# ---- as Numba calls them: addresses and distances are integers, in bytes ------------------------


def define_vector_kernel(rows: int, count: int, pairs: bool) -> Any:
    """Return an intrinsic `(c, ldc, a, b, panel, words, accumulate)`.

    `panel` is the distance from 16 columns of B to the next 16.
    """
    kernel = VectorKernel(rows, count, pairs)

    @intrinsic
    def call(context: Any, c: Any, ldc: Any, a: Any, b: Any, panel: Any, words: Any, accumulate: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            if not pairs or "avx512bf16" in cpu.enabled_units():
                kernel.emit(builder, *values)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return call


float_block = define_vector_kernel(ROWS, COLUMNS // 16, pairs=False)
float_last = define_vector_kernel(LAST_ROWS, COLUMNS // 16, pairs=False)
float_narrow = define_vector_kernel(NARROW_ROWS, 1, pairs=False)
pair_block = define_vector_kernel(ROWS, COLUMNS // 16, pairs=True)
pair_narrow = define_vector_kernel(NARROW_ROWS, 1, pairs=True)


def on_tile_unit(emit: Callable[..., None], count: int) -> Any:
    """Return what an intrinsic with `count` integers returns; on machines without AMX it does nothing."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if "amx" in cpu.enabled_units():
            emit(builder, *values)
        return context.get_dummy_value()

    return types.void(*[types.int64] * count), generate


@intrinsic
def multiply_tiles(
    context: Any,
    c: Any,
    ldc: Any,
    a: Any,
    a_panel: Any,
    b: Any,
    b_panel: Any,
    words: Any,
    accumulate: Any,
) -> Any:
    """Compute 32 x 32 elements of C from bf16."""
    return on_tile_unit(emit_tile_kernel, 8)


@intrinsic
def zero_byte_sums(context: Any) -> Any:
    """Set 32 x 32 integer sums to zero."""
    return on_tile_unit(emit_zero_tiles, 0)


@intrinsic
def add_byte_products(context: Any, a: Any, a_panel: Any, b: Any, b_panel: Any) -> Any:
    """Add the products of two tiles of A and two of B to 32 x 32 integer sums."""
    return on_tile_unit(emit_add_byte_products, 4)


@intrinsic
def store_byte_sums(context: Any, c: Any, ldc: Any) -> Any:
    """Store 32 x 32 integer sums."""
    return on_tile_unit(emit_store_tiles, 2)


@intrinsic
def tiles_on(context: Any) -> Any:
    """Configure the tile unit."""
    return on_tile_unit(emit_configure, 0)


@intrinsic
def tiles_off(context: Any) -> Any:
    """Release the tile unit."""
    return on_tile_unit(emit_release, 0)


@intrinsic
def store_row(context: Any, c: Any, source: Any, count: Any) -> Any:
    """Store up to 32 finished sums in a row of C."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        emit_store_row(builder, *values)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@intrinsic
def scratch_block(context: Any) -> Any:
    """Return the address of 4 KB on the stack, for blocks smaller than 32 x 32."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return allocate_scratch(builder, 4 * TILE)

    return types.int64(), generate
