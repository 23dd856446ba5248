"""The inner loop of products of 8-bit integers: one block of k, for some rows and columns of C.

Operands are tiles as in microkernel.py; a word is four integers that are neighbors along k, unsigned in A and
signed in B. A block is a header, with 16 scales and 16 first sums, and the tiles of its words.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llamatrain.compiler.simd import llvm_ops as W
from llamatrain.compiler.simd.llvm_ops import BYTE, FLOAT, INT, LONG, SHORT, load, store
from llamatrain.kernels.cpu.llvm.microkernel import add_offset, prefetch
from llamatrain.kernels.cpu.tile_shape import INT8_HEADER, INT8_LAST_ROWS, INT8_ROWS, ROW
from llamatrain.platform import cpu
from llamatrain.platform.cpu_features import AARCH64

WORDS_IN_TILE = 16
STEP = 4  # words along k in one iteration
Step = Callable[[Any, Any, list[Any], list[Any]], Any]  # builder, sums, words of A, vectors of B -> sums


def add_by_pairs(builder: Any, total: Any, left: list[Any], right: list[Any]) -> Any:
    """Add the products of two words without VNNI: four products are added in 16 bits, which hold them."""
    count = total.type.count
    bytes_of, shorts = ir.VectorType(BYTE, 4 * count), ir.VectorType(SHORT, 2 * count)
    multiply_bytes, multiply_shorts = (
        ("avx512.pmaddubs.w.512", "avx512.pmaddw.d.512")
        if count == 16
        else ("avx2.pmadd.ub.sw", "avx2.pmadd.wd")
    )
    pairs = [
        W.call(
            builder, f"llvm.x86.{multiply_bytes}", shorts, *(builder.bitcast(each, bytes_of) for each in word)
        )
        for word in zip(left, right, strict=True)
    ]
    fours, ones = builder.add(*pairs), W.constant(shorts, 1)
    return builder.add(total, W.call(builder, f"llvm.x86.{multiply_shorts}", total.type, fours, ones))


def add_by_vnni(builder: Any, total: Any, left: list[Any], right: list[Any]) -> Any:
    """Add the products of two words by the dot products of VNNI."""
    name = f"llvm.x86.avx512.vpdpbusd.{32 * total.type.count}"
    for a, b in zip(left, right, strict=True):
        total = W.call(builder, name, total.type, total, a, b)
    return total


def add_by_neon(builder: Any, total: Any, left: list[Any], right: list[Any]) -> Any:
    """Add the products of four words of signed bytes: eight products are added in 16 bits, which hold them."""
    bytes_of = ir.VectorType(BYTE, 16)
    products, lanes = ir.VectorType(SHORT, 8), ir.VectorType(INT, 8)
    halves = []
    for first in (0, 8):
        half, summed = ir.Constant(lanes, list(range(first, first + 8))), None
        for word in zip(left, right, strict=True):
            parts = (builder.bitcast(each, bytes_of) for each in word)
            parts = (builder.shuffle_vector(each, each, half) for each in parts)
            product = builder.mul(*(builder.sext(each, products) for each in parts))
            summed = builder.add(summed, product) if summed else product
        halves.append(summed)
    pairs = W.call(builder, "llvm.aarch64.neon.addp.v8i16", products, *halves)
    return builder.add(total, W.call(builder, "llvm.aarch64.neon.saddlp.v4i32.v8i16", total.type, pairs))


def add_by_dotprod(builder: Any, total: Any, left: list[Any], right: list[Any]) -> Any:
    """Add the products of two words of signed bytes by dot products. The second operand may be one lane of a vector."""
    return _add_by_dot(builder, "sdot", total, right, left)


def add_by_i8mm(builder: Any, total: Any, left: list[Any], right: list[Any]) -> Any:
    """Add the products of two words, unsigned by signed, by dot products."""
    return _add_by_dot(builder, "usdot", total, left, right)


def _add_by_dot(builder: Any, name: str, total: Any, left: list[Any], right: list[Any]) -> Any:
    bytes_of = ir.VectorType(BYTE, 16)
    for word in zip(left, right, strict=True):
        operands = (builder.bitcast(each, bytes_of) for each in word)
        total = W.call(builder, f"llvm.aarch64.neon.{name}.v4i32.v16i8", total.type, total, *operands)
    return total


@dataclass(frozen=True)
class BlockKernel:
    """Emits the product of one block: `rows` rows and 16 * `panels` columns, in vectors of `lanes` columns.

    The step takes `together` words of each operand. If it takes signed bytes of A, 128 is subtracted from them
    again, and sums start from 0.
    """

    rows: int
    panels: int
    lanes: int
    step: Step
    signed: bool = False
    together: int = 2

    @property
    def words(self) -> Any:
        """The type of a vector of integers."""
        return ir.VectorType(INT, self.lanes)

    @property
    def align(self) -> int:
        """The alignment of vectors in tiles and headers."""
        return min(32, 4 * self.lanes)

    @property
    def floats(self) -> Any:
        """The type of a vector of float32."""
        return ir.VectorType(FLOAT, self.lanes)

    def emit(
        self,
        builder: Any,
        c: Any,
        ldc: Any,
        a: Any,
        scales: Any,
        b: Any,
        panel: Any,
        tiles: Any,
        accumulate: Any,
    ) -> None:
        """Emit the kernel. `a` is the first row in its first tile, `scales` are those of the rows."""
        places = [(j, 4 * v) for j in range(self.panels) for v in range(0, 16, self.lanes)]
        headers = [add_offset(builder, builder.add(b, builder.mul(panel, LONG(j))), v) for j, v in places]
        rows = [builder.add(c, builder.mul(ldc, LONG(i))) for i in range(self.rows)]
        for row in rows:
            prefetch(builder, row)
        first = [
            W.constant(self.words, 0)
            if self.signed
            else load(builder, add_offset(builder, header, ROW), self.words, self.align)
            for header in headers
        ]
        sums = self.emit_loop(builder, first * self.rows, a, headers, tiles)
        old = W.splat(
            builder, builder.icmp_signed("!=", accumulate, LONG(0)), ir.VectorType(W.BIT, self.lanes)
        )
        factors = [load(builder, header, self.floats, self.align) for header in headers]
        for i, row in enumerate(rows):
            scale = W.splat(builder, load(builder, add_offset(builder, scales, 4 * i), FLOAT, 4), self.floats)
            for at, (j, offset) in enumerate(places):
                place = add_offset(builder, row, ROW * j + offset)
                made = builder.fmul(builder.sitofp(sums[i * len(places) + at], self.floats), scale)
                made = builder.fmul(made, factors[at])
                before = builder.select(
                    old, load(builder, place, self.floats, 4), W.constant(self.floats, 0.0)
                )
                store(builder, builder.fadd(before, made), place, 4)

    def emit_loop(self, builder: Any, first: list[Any], a: Any, headers: list[Any], tiles: Any) -> list[Any]:
        """Emit the loop over the words of the block, STEP words at a time."""
        enter = builder.block
        loop, done = builder.append_basic_block("loop"), builder.append_basic_block("done")
        builder.branch(loop)
        builder.position_at_end(loop)
        word, *totals = (builder.phi(kind) for kind in (LONG, *[self.words] * len(first)))
        for phi, value in zip((word, *totals), (LONG(0), *first), strict=True):
            phi.add_incoming(value, enter)
        sums = self.emit_step(builder, totals, a, headers, word)
        following = builder.add(word, LONG(STEP))
        for phi, value in zip((word, *totals), (following, *sums), strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, builder.shl(tiles, LONG(4))), loop, done)
        builder.position_at_end(done)
        return sums

    def emit_step(self, builder: Any, totals: list[Any], a: Any, headers: list[Any], word: Any) -> list[Any]:
        """Emit one iteration and return the new sums."""
        within = builder.shl(builder.and_(word, LONG(WORDS_IN_TILE - 1)), LONG(2))
        left = builder.add(a, builder.add(builder.shl(builder.and_(word, LONG(-16)), LONG(6)), within))
        down, sums = add_offset(builder, builder.shl(word, LONG(6)), INT8_HEADER), list(totals)
        bases = [builder.add(header, down) for header in headers]
        vectors = self.load_vectors(builder, left)
        for step in range(0, STEP, self.together):
            right = [
                [
                    load(builder, add_offset(builder, base, ROW * (step + each)), self.words, self.align)
                    for each in range(self.together)
                ]
                for base in bases
            ]
            for i in range(self.rows):
                words = [
                    self.spread_lane(builder, vectors[i], step + each)
                    if vectors
                    else self.load_word(builder, add_offset(builder, left, ROW * i + 4 * (step + each)))
                    for each in range(self.together)
                ]
                for j, column in enumerate(right):
                    at = i * len(right) + j
                    sums[at] = self.step(builder, sums[at], words, column)
        return sums

    def load_vectors(self, builder: Any, left: Any) -> list[Any]:
        """Return the words of each row of A for one iteration, if they fill a vector: NEON multiplies by a lane."""
        if self.lanes != STEP:
            return []
        rows = (load(builder, add_offset(builder, left, ROW * i), self.words, 4) for i in range(self.rows))
        flipped = ir.Constant(self.words, [0x80808080] * self.lanes)
        return [builder.xor(row, flipped) if self.signed else row for row in rows]

    def spread_lane(self, builder: Any, vector: Any, lane: int) -> Any:
        """Return a vector with one lane of another in every lane."""
        return builder.shuffle_vector(vector, vector, ir.Constant(self.words, [lane] * self.lanes))

    def load_word(self, builder: Any, address: Any) -> Any:
        """Load a word of A into every lane."""
        return W.splat(builder, load(builder, address, INT, 4), self.words)


def choose_kernel(rows: int, panels: int) -> BlockKernel | None:
    """Return the kernel for the units of this process; None if it has none of them."""
    if not cpu.has_int8_products():
        return None
    if cpu.processor().architecture == AARCH64:
        return choose_neon_kernel(rows, panels)
    step = add_by_vnni if cpu.enabled_units() & {"avx512vnni", "avxvnni"} else add_by_pairs
    return BlockKernel(rows, panels, cpu.vector_width(), step)


def choose_neon_kernel(rows: int, panels: int) -> BlockKernel:
    """Return the kernel for the units of AArch64."""
    lanes = cpu.vector_width()
    if "i8mm" in cpu.enabled_units():
        return BlockKernel(rows, panels, lanes, add_by_i8mm)
    if "dotprod" in cpu.enabled_units():
        return BlockKernel(rows, panels, lanes, add_by_dotprod, signed=True)
    return BlockKernel(rows, panels, lanes, add_by_neon, signed=True, together=4)


def define_block_kernel(rows: int, panels: int) -> Any:
    """Return an intrinsic `(c, ldc, a, scales, b, panel, tiles, accumulate)`.

    `panel` is the distance from 16 columns of B to the next 16.
    """

    @intrinsic
    def call(
        context: Any, c: Any, ldc: Any, a: Any, scales: Any, b: Any, panel: Any, tiles: Any, accumulate: Any
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            if kernel := choose_kernel(rows, panels):
                kernel.emit(builder, *values)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), generate

    return call


block_wide, block_narrow = define_block_kernel(INT8_ROWS, 2), define_block_kernel(INT8_ROWS, 1)
block_last = define_block_kernel(INT8_LAST_ROWS, 1)
