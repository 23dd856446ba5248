"""Products of 8-bit integers: rounding and packing of operands, and C (+)= A Bᵀ, in the cache, by one thread.

`kernels/reference/int8.py` defines the rounding, and these functions give its bits. A is rounded as activations
and B as a weight. A panel has 16 rows of A or columns of B; it is a sequence of blocks, each a header (16 scales,
and what the sums of 16 columns start from) and up to four tiles. A is stored with 128 added; so a sum starts
from -128 times the sum of the column's integers.
"""

import numpy as np

from llamatrain.compiler.declare import LazyModule, SharedKernel, exact, f32, inline, u8
from llamatrain.compiler.vectors import vec16 as L
from llamatrain.gguf.quants import kinds as K
from llamatrain.kernels.cpu.dequantize import decode
from llamatrain.kernels.cpu.dropout import STEP, mix_uint32
from llamatrain.kernels.cpu.tile_shape import (
    INT8_BY_TILES,
    INT8_COLUMNS,
    INT8_HEADER,
    INT8_LAST_ROWS,
    INT8_ROWS,
    NEAR_BYTES,
    ROW,
    TILE,
)
from llamatrain.kernels.reference.int8 import BLOCK, LARGEST, LARGEST_SUM, SMALLEST

int8_kernel, micro, tile_rows = (
    LazyModule(f"llamatrain.kernels.cpu.llvm.{name}") for name in ("int8_kernel", "microkernel", "tile_rows")
)

DEPTH = 64  # elements along k in a tile
SIDE = 32  # rows and columns of a block of C that the tile unit computes
ROWS_AT_ONCE = 8  # rows of it that are scaled after the products of two tiles
BLOCK_BYTES = INT8_HEADER + BLOCK // DEPTH * TILE
PITCH = 4 * BLOCK + ROW  # between rows of a slab: a column's elements must not share few lines of the cache
INT8_SLAB_BYTES = BLOCK * PITCH
INFINITE = 0x7F800000  # the bits of infinity; those of NaN are larger
INVERTIBLE = int(np.float32(SMALLEST).view(np.int32))
ZERO, NAN = np.float32(0), np.float32(np.nan)
LIMIT, LIMIT_OF_SUM = np.float32(LARGEST), np.float32(LARGEST_SUM)


@inline
def int8_panel_bytes(count, k):
    """Return the packed bytes of `count` rows of A or columns of B."""
    blocks, tiles = max(1, (k + BLOCK - 1) // BLOCK), max(1, (k + DEPTH - 1) // DEPTH)
    return (count + 15) // 16 * (blocks * INT8_HEADER + tiles * TILE)


# ---- rounding ----------------------------------------------------------------------------------


@exact
def scale_of(bits, limit):
    """Return the scale of a block by the bits of its largest value."""
    if bits >= INFINITE:
        return NAN
    return ZERO if bits < INVERTIBLE else L.bits_to_float(bits) / limit


@exact
def factor_of(bits, limit):
    """Return what the elements of a block are multiplied by; 0 if all become 0."""
    return ZERO if bits >= INFINITE or bits < INVERTIBLE else limit / L.bits_to_float(bits)


@exact
def stage(slab, kind, source, length):
    """Decode a row of a block to float32, and fill it with zeros to whole tiles."""
    decode(kind, slab, 0, source, length)
    for at in range(length, (length + DEPTH - 1) // DEPTH * DEPTH):
        f32(slab)[at] = ZERO


@exact
def draw(x, column, seed):
    """Round 16 numbers up or down, to at most 127, by a hash of each column."""
    z = L.count_up(column) * np.int64(STEP) + np.int64(seed)
    z = (z ^ (z >> 16)) * 0x85EBCA6B
    z = (z ^ (z >> 13)) * 0xC2B2AE35
    z = z ^ (z >> 16)
    fractions = L.to_floats(z >> 8) * np.float32(2.0**-24)
    below = L.floor(x)
    return L.minimum(below + L.floor((x - below) + fractions), LIMIT)


@exact
def round_left(to, scale_place, source, tiles, column, row, at_random):
    """Round a row of a block of A; `column` and `row` are its position in the source."""
    data, largest = u8(source), L.spread(0)
    for at in range(0, tiles * DEPTH, 16):
        largest = L.larger_words(largest, L.magnitude_bits(L.get_floats(data + 4 * at)))
    bits = L.reduce_word_max(largest)
    factor = factor_of(bits, LIMIT)
    L.put_float(u8(scale_place), scale_of(bits, LIMIT))
    seed = mix_uint32(np.uint32(mix_uint32(np.uint32(bits)) + np.uint32(row)))
    for at in range(0, tiles * DEPTH, 16):
        place = u8(to) + (at // DEPTH * TILE + at % DEPTH)
        if factor == ZERO:
            L.put_bytes(place, L.spread(128))
        elif at_random:
            drawn = draw(L.get_floats(data + 4 * at) * factor, column + at, seed)
            L.put_bytes(place, L.to_ints(drawn) + 128)
        else:
            L.put_bytes(place, L.nearest_ints(L.get_floats(data + 4 * at) * factor) + 128)


@exact
def round_right(to, header, lane, source, tiles):
    """Round a row of a block of a weight that becomes a column of B: as a row of tiles, to be transposed."""
    data, largest = u8(source), L.spread(0)
    for at in range(0, tiles * DEPTH, 64):
        a, b = L.get_floats(data + 4 * at), L.get_floats(data + (4 * at + 64))
        c, d = L.get_floats(data + (4 * at + 128)), L.get_floats(data + (4 * at + 192))
        sums = L.sum_fours(L.absolute(a), L.absolute(b), L.absolute(c), L.absolute(d))
        largest = L.larger_words(largest, L.magnitude_bits(sums))
    bits = L.reduce_word_max(largest)
    factor, total = factor_of(bits, LIMIT_OF_SUM), L.spread(0)
    for at in range(0, tiles * DEPTH, 16):
        place = u8(to) + (at // DEPTH * TILE + at % DEPTH)
        rounded = L.spread(0)
        if factor != ZERO:
            rounded = L.nearest_ints(L.get_floats(data + 4 * at) * factor)
        L.put_bytes(place, rounded)
        total = total + rounded
    L.put_float(u8(header) + 4 * lane, scale_of(bits, LIMIT_OF_SUM))
    L.put_word(u8(header) + (ROW + 4 * lane), L.reduce_word_sum(total) * -128)


@exact
def sum_of_four(data, row, second):
    """Return the sums of the magnitudes of rows 0, 1, 4 and 5, or (second = 2) 2, 3, 6 and 7, in 16 columns."""
    first, next_one = data + (row + second) * PITCH, data + (row + second + 1) * PITCH
    left = L.absolute(L.get_floats(first)) + L.absolute(L.get_floats(first + 4 * PITCH))
    return left + (L.absolute(L.get_floats(next_one)) + L.absolute(L.get_floats(next_one + 4 * PITCH)))


@exact
def round_across(target, source, tiles):
    """Round 16 columns of a slab with a row for each element along k: a block of B."""
    data, header, largest = u8(source), u8(target), L.spread(0)
    for row in range(0, tiles * DEPTH, 8):
        for second in range(0, 4, 2):
            largest = L.larger_words(largest, L.magnitude_bits(sum_of_four(data, row, second)))
    L.put_words(header + ROW, largest)
    for lane in range(16):
        bits = L.get_word(header + (ROW + 4 * lane))
        L.put_float(header + 4 * lane, scale_of(bits, LIMIT_OF_SUM))
        L.put_float(header + (ROW + 4 * lane), factor_of(bits, LIMIT_OF_SUM))
    factors, total = L.get_floats(header + ROW), L.spread(0)
    for row in range(0, tiles * DEPTH, 4):
        word = L.spread(0)
        for i in range(4):
            x = L.get_floats(data + (row + i) * PITCH)
            rounded = L.nearest_ints(L.where_nonzero(factors, x * factors))
            total = total + rounded
            word = word | (rounded & 255) << 8 * i
        L.put_words(header + (INT8_HEADER + row // 4 * ROW), word)
    L.put_words(header + ROW, total * -128)


# ---- packing -----------------------------------------------------------------------------------


@SharedKernel
def pack_left(to, kind, source, row_bytes, first, rows, start, k, at_random, slab):
    """Round and pack rows of A from `first` on, k elements from `start` on."""
    panel, size = int8_panel_bytes(16, k), K.SIZE[kind]
    for row in range(rows):
        line = source + (first + row) * row_bytes + start * size
        for at in range(0, k, BLOCK):
            length, block = min(BLOCK, k - at), to + row // 16 * panel + at // BLOCK * BLOCK_BYTES
            data = line + at * size
            if kind != K.F32 or length % DEPTH:
                stage(slab, kind, data, length)
                data = slab
            tiles = (length + DEPTH - 1) // DEPTH
            target = block + INT8_HEADER + row % 16 * ROW
            round_left(target, block + row % 16 * 4, data, tiles, start + at, first + row, at_random)


@SharedKernel
def pack_right(to, kind, source, row_bytes, first, rows, start, k, slab):
    """Round and pack columns of B that are rows of a weight."""
    panel, per_element, size = int8_panel_bytes(16, k), K.BLOCK[kind], K.SIZE[kind]
    for row in range(0, rows, 16):
        for at in range(0, k, BLOCK):
            length, block = min(BLOCK, k - at), to + row // 16 * panel + at // BLOCK * BLOCK_BYTES
            tiles = (length + DEPTH - 1) // DEPTH
            for i in range(min(16, rows - row)):
                line = source + (first + row + i) * row_bytes + (start + at) // per_element * size
                stage(slab, kind, line, length)
                round_right(block + INT8_HEADER + i * ROW, block, i, slab, tiles)
            for tile in range(tiles):
                tile_rows.transpose_tile(block + INT8_HEADER + tile * TILE)


@SharedKernel
def pack_across(to, kind, source, row_bytes, first, columns, start, k, slab):
    """Round and pack columns of B that are columns of a weight, from `first` on; k are its rows from `start` on."""
    panel, per_element, size = int8_panel_bytes(16, k), K.BLOCK[kind], K.SIZE[kind]
    for column in range(0, columns, BLOCK):
        width = min(BLOCK, columns - column)
        for at in range(0, k, BLOCK):
            length = min(BLOCK, k - at)
            whole = (length + DEPTH - 1) // DEPTH * DEPTH
            line = source + (start + at) * row_bytes + (first + column) // per_element * size
            for i in range(length):
                decode(kind, slab + i * PITCH, 0, line + i * row_bytes, width)
            for i in range(length, whole):
                for j in range(width):
                    f32(slab + i * PITCH)[j] = ZERO
            for j in range(0, width, 16):
                target = to + (column + j) // 16 * panel + at // BLOCK * BLOCK_BYTES
                round_across(target, slab + 4 * j, whole // DEPTH)


left_call, right_call, across_call = pack_left.call, pack_right.call, pack_across.call


@inline
def pack_int8(is_a, across, to, kind, source, row_bytes, first, rows, start, k, at_random, slab):
    """Round and pack a part of an operand by the shared kernels."""
    if is_a:
        left_call((to, kind, source, row_bytes, first, rows, start, k, at_random, slab))
    elif across:
        across_call((to, kind, source, row_bytes, first, rows, start, k, slab))
    else:
        right_call((to, kind, source, row_bytes, first, rows, start, k, slab))


# ---- multiplying -------------------------------------------------------------------------------


@inline
def copy_edge(to, to_pitch, source, pitch, rows, columns):
    """Copy a part of a block of C."""
    for i in range(rows):
        for j in range(columns):
            f32(to + i * to_pitch)[j] = f32(source + i * pitch)[j]


@exact
def multiply_blocks(c, pitch, left, right, row, panel, columns, k, accumulate):
    """Multiply rows of a panel of A, from `row` on, and one or two panels of B: block by block."""
    for at in range(0, max(1, k), BLOCK):
        tiles, more = (min(BLOCK, k - at) + DEPTH - 1) // DEPTH, accumulate or at > 0
        data, scales = left + INT8_HEADER + row * ROW, left + row * 4
        if columns > 16:
            int8_kernel.block_wide(c, pitch, data, scales, right, panel, tiles, more)
        elif INT8_LAST_ROWS < INT8_ROWS and 16 - row < INT8_ROWS:
            int8_kernel.block_last(c, pitch, data, scales, right, panel, tiles, more)
        else:
            int8_kernel.block_narrow(c, pitch, data, scales, right, panel, tiles, more)
        left, right = left + BLOCK_BYTES, right + BLOCK_BYTES


@exact
def add_scaled(held, sums, scales, header, next_header):
    """Scale some rows of integer sums, and add them to those of the blocks before."""
    for j in range(0, SIDE, 16):
        place = u8(next_header if j else header)
        factors, first = L.get_floats(place), L.get_words(place + ROW)
        for i in range(ROWS_AT_ONCE):
            at = (i * SIDE + j) * 4
            made = L.to_floats(L.get_words(u8(sums + at)) + first) * L.get_float(u8(scales + 4 * i)) * factors
            L.put_floats(u8(held + at), L.get_floats(u8(held + at)) + made)


@inline
def add_product(held, a, a_panel, b, b_panel, k):
    """Add the product of two panels of each side by the tile unit, which multiplies a block as the last is scaled."""
    even, odd = micro.scratch_block(), micro.scratch_block()
    for block in range(max(1, (k + BLOCK - 1) // BLOCK) + 1):
        left, right = a + block * BLOCK_BYTES, b + block * BLOCK_BYTES
        sums, next_sums = (even, odd) if block % 2 else (odd, even)
        micro.zero_byte_sums()
        for tile in range(BLOCK // DEPTH):
            if block * BLOCK + tile * DEPTH < k:
                at = INT8_HEADER + tile * TILE
                micro.add_byte_products(left + at, a_panel, right + at, b_panel)
            if block:
                header, rows = right - BLOCK_BYTES, tile * ROWS_AT_ONCE
                scales = left - BLOCK_BYTES + rows // 16 * a_panel + rows % 16 * 4
                at = rows * SIDE * 4
                add_scaled(held + at, sums + at, scales, header, header + b_panel)
        micro.store_byte_sums(next_sums, SIDE * 4)


@inline
def multiply_by_tiles(c, ldc, a, b, m, n, k, accumulate):
    """Multiply packed operands by the tile unit, 32 x 32 elements of C at a time, which is read and written once."""
    panel, held = int8_panel_bytes(16, k), micro.scratch_block()
    near = max(1, NEAR_BYTES // (2 * panel)) * SIDE
    for step in range((n + near - 1) // near * ((m + SIDE - 1) // SIDE)):
        i, first = step % ((m + SIDE - 1) // SIDE) * SIDE, step // ((m + SIDE - 1) // SIDE) * near
        for j in range(first, min(n, first + near), SIDE):
            rows, columns, corner = min(SIDE, m - i), min(SIDE, n - j), c + (i * ldc + j) * 4
            for row in range(SIDE):
                line, there = (row, columns) if accumulate and row < rows else (0, 0)
                tile_rows.some_floats(held + row * SIDE * 4, corner + line * ldc * 4, there)
            a_panel, b_panel = panel if m - i > 16 else 0, panel if n - j > 16 else 0
            add_product(held, a + i // 16 * panel, a_panel, b + j // 16 * panel, b_panel, k)
            for row in range(rows):
                micro.store_row(corner + row * ldc * 4, held + row * SIDE * 4, columns)


@inline
def multiply_by_vectors(c, ldc, a, b, m, n, k, accumulate):
    """Multiply packed operands by vectors, 16 or 32 columns of B with all rows of A at a time."""
    panel, space = int8_panel_bytes(16, k), micro.scratch_block()
    for j in range(0, n, INT8_COLUMNS):
        i = 0
        while i < m:
            high = min(INT8_ROWS, 16 - i % 16)
            rows, columns = min(high, m - i), min(INT8_COLUMNS, n - j)
            corner = c + (i * ldc + j) * 4
            is_whole = rows == high and columns == INT8_COLUMNS
            target, pitch = (corner, ldc * 4) if is_whole else (space, INT8_COLUMNS * 4)
            if accumulate and not is_whole:
                copy_edge(target, pitch, corner, ldc * 4, rows, columns)
            left, right = a + i // 16 * panel, b + j // 16 * panel
            multiply_blocks(target, pitch, left, right, i % 16, panel, columns, k, accumulate)
            if not is_whole:
                copy_edge(corner, ldc * 4, target, pitch, rows, columns)
            i += high


@SharedKernel
def multiply_int8(c, ldc, a, b, m, n, k, accumulate):
    """Multiply packed operands."""
    if INT8_BY_TILES:
        multiply_by_tiles(c, ldc, a, b, m, n, k, accumulate)
    else:
        multiply_by_vectors(c, ldc, a, b, m, n, k, accumulate)


multiply_int8_call = multiply_int8.call
