"""Matrix products of packed operands: C[m, n] (+)= sum over k of A[m, k] B[n, k], in the cache, by one thread.

Matrix products, the fused loss and attention are built from these functions for compiled code. Addresses are
integers, and `ldc`, the distance between rows of C, is in float32 elements.

    panel_bytes(mode, count, k)    the bytes of count rows of A, or columns of B, when packed
    pack_a(mode, to, source, half, across, stride, m, k)
    pack_b(mode, to, source, half, across, stride, n, k)
        `half`: the source is bf16, else float32. `across`: 0 if each row (column) is contiguous along k, 1 if the
        rows (columns) are interleaved; `stride` is the distance in elements along the other axis. `to` must be
        aligned to 64 bytes. Tiles at the edge are filled with zeros.
    configure_tiles(mode); multiply(mode, c, ldc, a, b, m, n, k, accumulate, by_rows); release_tiles(mode)
        `by_rows`: A's rows are the outer loop and B's columns the inner one, so that b (small) stays in the cache;
        0: the other way round. The tile unit always uses the former, with as many columns of B at a time as stay
        in the cache: it waits for lines that it writes, and those of one row arrive soonest one after the other.
        C need not be aligned; only m x n of it are written. Each sum depends on its row and column alone: it has
        the same bits in a block of any size.

`mode` says what is multiplied and how: FLOAT32, ROUNDED (bf16 as float32: any machine), PAIRS (AVX-512 BF16),
TILES (AMX). All of them sum in float32. `choose_mode("bf16")` is the fastest that this machine has.
"""

from llamatrain.compiler.declare import LazyModule, SharedKernel, inline
from llamatrain.kernels.cpu.tile_shape import COLUMNS, NARROW_ROWS, NEAR_BYTES, ROW, ROWS, TILE
from llamatrain.platform import cpu

micro, tile_rows = (
    LazyModule(f"llamatrain.kernels.cpu.llvm.{name}") for name in ("microkernel", "tile_rows")
)

FLOAT32, ROUNDED, PAIRS, TILES = range(4)
SIDE = 32  # rows and columns of a block of C


def choose_mode(precision: str) -> int:
    """Return the mode for "f32" or "bf16".

    "avx512bf16", "amx" and "float32" (bf16 without either) ask for that unit.
    """
    if precision == "bf16":
        precision = next((unit for unit in ("amx", "avx512bf16") if unit in cpu.enabled_units()), "float32")
    return {"f32": FLOAT32, "float32": ROUNDED, "avx512bf16": PAIRS, "amx": TILES}[precision]


@inline
def tile_depth(mode):
    """Return the elements along k in a tile."""
    return 32 if mode >= PAIRS else 16


@inline
def panel_tiles(mode, k):
    """Return the tiles along k: at least one, so that an empty sum is zero."""
    depth = tile_depth(mode)
    return max(1, (k + depth - 1) // depth)


@inline
def panel_bytes(mode, count, k):
    """Return the packed bytes of `count` rows of A or columns of B."""
    return (count + 15) // 16 * panel_tiles(mode, k) * TILE


def packed_bytes(mode: int, count: int, k: int) -> int:
    """Return panel_bytes for plans, without calling a helper, which would start the compiler."""
    depth = 32 if mode >= PAIRS else 16
    return -(-count // 16) * max(1, -(-k // depth)) * TILE


# ---- packing -----------------------------------------------------------------------------------


@inline
def fill_tile(mode, to, source, half, across, pitch):
    """Fill a whole tile: a row of words for each row of the source (or two of them), `pitch` bytes apart."""
    if (mode == FLOAT32 and not half) or (mode >= PAIRS and half and not across):
        for i in range(16):
            tile_rows.copy(to + i * ROW, source + i * pitch, 0)
    elif mode < PAIRS and half:
        for i in range(16):
            tile_rows.widen(to + i * ROW, source + i * pitch, 0)
    elif mode < PAIRS:
        for i in range(16):
            tile_rows.round_floats(to + i * ROW, source + i * pitch, 0)
    elif not across:
        for i in range(16):
            tile_rows.narrow(to + i * ROW, source + i * pitch, 0)
    elif half:
        for i in range(16):
            tile_rows.pair_up(to + i * ROW, source + 2 * i * pitch, source + (2 * i + 1) * pitch)
    else:
        for i in range(16):
            tile_rows.pair(to + i * ROW, source + 2 * i * pitch, source + (2 * i + 1) * pitch)


@inline
def fill_two(to, distance, source, pitch):
    """Fill two neighboring tiles of bf16 that lie across."""
    for i in range(16):
        line = source + 2 * i * pitch
        tile_rows.pair_both(to + i * ROW, line, line + pitch, to + distance + i * ROW)


@inline
def fill_edge(mode, to, source, half, across, pitch, rows, columns):
    """Fill a tile at the source's edge with rows x columns elements and zeros."""
    whole, size = micro.scratch_block(), 2 if half else 4
    for i in range(32 if across else 16):
        # empty loads need a valid address, too: an unmapped page costs microseconds
        line, there = (source + i * pitch, columns) if i < rows else (source, 0)
        if half:
            tile_rows.some_halves(whole + i * 64, line, there)
        else:
            tile_rows.some_floats(whole + i * 128, line, there)
    fill_tile(mode, to, whole, half, across, 32 * size)


@SharedKernel
def pack_tiles(mode, to, source, half, across, transpose, stride, count, k):
    """Pack a source into tiles."""
    size, depth = 2 if half else 4, tile_depth(mode)
    panels, tiles = (count + 15) // 16, panel_tiles(mode, k)
    pitch, in_pairs = stride * size, mode >= PAIRS and half and across
    for step in range(panels * tiles):  # along the contiguous axis of the source
        panel, tile = (step % panels, step // panels) if across else (step // tiles, step % tiles)
        target = to + (panel * tiles + tile) * TILE
        items, tile_k = min(16, count - panel * 16), min(depth, k - tile * depth)
        if across:
            start = source + tile * depth * pitch + panel * 16 * size
        else:
            start = source + panel * 16 * pitch + tile * depth * size
        if in_pairs and tile_k == depth and panel // 2 * 32 + 32 <= count:
            if panel % 2 == 0:
                fill_two(target, tiles * TILE, start, pitch)
        elif items == 16 and tile_k == depth:
            fill_tile(mode, target, start, half, across, pitch)
        elif across:
            fill_edge(mode, target, start, half, across, pitch, tile_k, items)
        else:
            fill_edge(mode, target, start, half, across, pitch, items, tile_k)
        if transpose:
            tile_rows.transpose_tile(target)


pack_call = pack_tiles.call


@inline
def pack(mode, to, source, half, across, transpose, stride, count, k):
    """Pack a source into tiles by the shared kernel."""
    pack_call((mode, to, source, half, across, transpose, stride, count, k))


@inline
def pack_a(mode, to, source, half, across, stride, m, k):
    """Pack rows of the left operand."""
    pack(mode, to, source, half, across, across, stride, m, k)


@inline
def pack_b(mode, to, source, half, across, stride, n, k):
    """Pack columns of the right operand."""
    pack(mode, to, source, half, across, 1 - across, stride, n, k)


# ---- multiplying -------------------------------------------------------------------------------


@inline
def configure_tiles(mode):
    """Configure the tile unit, if the mode uses it."""
    if mode == TILES:
        micro.tiles_on()


@inline
def release_tiles(mode):
    """Release the tile unit, if the mode uses it."""
    if mode == TILES:
        micro.tiles_off()


@inline
def load_edge(space, c, ldc, rows, columns):
    """Copy a part of C to a 32 x 32 block."""
    for i in range(rows):
        tile_rows.some_floats(space + i * SIDE * 4, c + i * ldc * 4, columns)


@inline
def store_edge(space, c, ldc, rows, columns):
    """Copy a part of a finished 32 x 32 block to C."""
    for i in range(rows):
        micro.store_row(c + i * ldc * 4, space + i * SIDE * 4, columns)


@inline
def multiply_by_amx(c, ldc, a, b, panel, m, n, words, accumulate):
    """Compute a block of C with the tile unit."""
    a_panel, b_panel = panel if m > 16 else 0, panel if n > 16 else 0
    if m >= SIDE and n >= SIDE:
        micro.multiply_tiles(c, ldc * 4, a, a_panel, b, b_panel, words, accumulate)
    else:
        space, rows, columns = micro.scratch_block(), min(m, SIDE), min(n, SIDE)
        if accumulate:
            load_edge(space, c, ldc, rows, columns)
        micro.multiply_tiles(space, SIDE * 4, a, a_panel, b, b_panel, words, accumulate)
        store_edge(space, c, ldc, rows, columns)


@inline
def multiply_by_vectors(mode, c, ldc, a, b, panel, m, n, words, accumulate):
    """Compute a block of C with vectors."""
    space, wide = micro.scratch_block(), COLUMNS == SIDE and n > 16
    columns, usual = (COLUMNS, ROWS) if wide else (16, NARROW_ROWS)
    for j in range(0, min(n, SIDE), columns):
        right, i = b + j // 16 * panel, 0
        while i < min(m, SIDE):
            high = min(usual, 16 - i % 16)
            corner, whole = c + (i * ldc + j) * 4, m - i >= high and n - j >= columns
            target, pitch = (corner, ldc * 4) if whole else (space, SIDE * 4)
            left = a + i // 16 * panel + i % 16 * ROW
            edge_rows, edge_columns = min(high, m - i), min(columns, n - j)
            if accumulate and not whole:
                load_edge(space, corner, ldc, edge_rows, edge_columns)
            if mode == PAIRS and wide:
                micro.pair_block(target, pitch, left, right, panel, words, accumulate)
            elif mode == PAIRS:
                micro.pair_narrow(target, pitch, left, right, panel, words, accumulate)
            elif wide:
                micro.float_block(target, pitch, left, right, panel, words, accumulate)
            elif high == usual:
                micro.float_narrow(target, pitch, left, right, panel, words, accumulate)
            else:
                micro.float_last(target, pitch, left, right, panel, words, accumulate)
            if not whole:
                store_edge(space, corner, ldc, edge_rows, edge_columns)
            i += high


@SharedKernel
def multiply_tiles(mode, c, ldc, a, b, m, n, k, accumulate, by_rows):
    """Multiply packed operands, block by block of C."""
    panel = panel_bytes(mode, 16, k)
    words = (k + 1) // 2 if mode >= PAIRS else k
    down, along = (m + SIDE - 1) // SIDE, (n + SIDE - 1) // SIDE
    near = NEAR_BYTES // (2 * panel) if mode == TILES else along if by_rows else 1
    near = min(max(1, near), along)
    for step in range(down * along):
        first = step // (near * down) * near
        offset, columns = step - first * down, min(near, along - first)
        i, j = offset // columns, first + offset % columns
        corner, left, right = c + (i * SIDE * ldc + j * SIDE) * 4, a + 2 * i * panel, b + 2 * j * panel
        if mode == TILES:
            multiply_by_amx(corner, ldc, left, right, panel, m - i * SIDE, n - j * SIDE, words, accumulate)
        else:
            multiply_by_vectors(
                mode, corner, ldc, left, right, panel, m - i * SIDE, n - j * SIDE, words, accumulate
            )


multiply_call = multiply_tiles.call


@inline
def multiply(mode, c, ldc, a, b, m, n, k, accumulate, by_rows):
    """Multiply packed operands by the shared kernel."""
    multiply_call((mode, c, ldc, a, b, m, n, k, accumulate, by_rows))
