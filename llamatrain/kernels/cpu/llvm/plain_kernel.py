"""The inner loop of products whose operands stay where they are: a few rows of C, and a vector of columns."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llamatrain.compiler.simd import llvm_ops as W
from llamatrain.compiler.simd.llvm_ops import FLOAT, LONG, load, store
from llamatrain.kernels.cpu.llvm.microkernel import FUSED
from llamatrain.kernels.cpu.tile_shape import PLAIN_ROWS
from llamatrain.platform.cpu import vector_width


def emit_rows(
    builder: Any,
    rows: Any,
    c: Any,
    ldc: Any,
    a: Any,
    row_stride: Any,
    step: Any,
    b: Any,
    pitch: Any,
    k: Any,
    accumulate: Any,
) -> None:
    """Emit the product of up to PLAIN_ROWS rows. A row that is not there is the last one again, and gives the same."""
    kind, last = ir.VectorType(FLOAT, vector_width()), builder.sub(rows, LONG(1))
    numbers = [
        builder.select(builder.icmp_signed("<", LONG(i), last), LONG(i), last) for i in range(PLAIN_ROWS)
    ]
    places = [builder.add(c, builder.mul(ldc, number)) for number in numbers]
    lines = [builder.add(a, builder.mul(row_stride, number)) for number in numbers]
    adding = W.splat(
        builder, builder.icmp_signed("!=", accumulate, LONG(0)), ir.VectorType(W.BIT, kind.count)
    )
    zero = W.constant(kind, 0.0)
    first = [builder.select(adding, load(builder, place, kind, 4), zero) for place in places]
    enter, loop, done = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    at, left, right, *sums = (builder.phi(each) for each in (LONG, LONG, LONG, *[kind] * PLAIN_ROWS))
    vector = load(builder, right, kind, 4)
    made = []
    for line, total in zip(lines, sums, strict=True):
        one = W.splat(builder, load(builder, builder.add(line, left), FLOAT, 4), kind)
        made.append(builder.fadd(total, builder.fmul(one, vector, flags=FUSED), flags=FUSED))
    following = [builder.add(at, LONG(1)), builder.add(left, step), builder.add(right, pitch), *made]
    for phi, start, value in zip(
        (at, left, right, *sums), (LONG(0), LONG(0), b, *first), following, strict=True
    ):
        phi.add_incoming(start, enter)
        phi.add_incoming(value, loop)
    builder.cbranch(builder.icmp_signed("<", following[0], k), loop, done)
    builder.position_at_end(done)
    for place, value in zip(places, made, strict=True):
        store(builder, value, place, 4)


@intrinsic
def multiply_rows(
    context: Any,
    rows: Any,
    c: Any,
    ldc: Any,
    a: Any,
    row_stride: Any,
    step: Any,
    b: Any,
    pitch: Any,
    k: Any,
    accumulate: Any,
) -> Any:
    """Compute `rows` rows of C; all distances are in bytes, `step` that between neighbors along k in A."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        emit_rows(builder, *values)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 10), generate
