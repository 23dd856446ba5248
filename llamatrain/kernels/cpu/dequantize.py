"""Packs quantized weights as operand B of products, equal to `tiles.pack_b` of the decoded weight.

pack_quantized(mode, to, kind, raw, row_bytes, across, first, rows, start, columns, slab)
    A weight W has a row of blocks for each output, `row_bytes` apart. Of it, `rows` rows from `first` on and
    `columns` columns from `start` on, both whole blocks. `across` 0: for y = x Wᵀ, k are the columns; 1: for
    dx = dy W, k are the rows. `to` takes panel_bytes(mode, rows, columns), or with `across`
    (mode, columns, rows). `slab` is SLAB_BYTES of the thread's own memory, aligned to 64: decoded weights that
    stay in the first-level cache. They are float32 where float32 is multiplied, otherwise rounded to bf16.
"""

import numpy as np

from llamatrain.compiler.declare import SharedKernel, inline, u8
from llamatrain.gguf.quants import kinds as K
from llamatrain.gguf.quants.decoding import decode_blocks
from llamatrain.kernels.cpu import tiles
from llamatrain.kernels.cpu.tile_shape import TILE

ROWS_ALONG, COLUMNS_ALONG = 16, 512  # rows and columns of a slab if rows become panels
ROWS_ACROSS, COLUMNS_ACROSS = 32, 256  # the same if columns do: both are whole tiles and whole blocks
SLAB_BYTES = 4 * ROWS_ACROSS * COLUMNS_ACROSS
ALONG, ACROSS = np.int64(0), np.int64(1)  # np.int64, because a helper is compiled again for each plain int


@SharedKernel
def decode_run(kind, to, half, source, elements):
    """Decode consecutive whole blocks."""
    decode_blocks(kind, u8(to), half, u8(source), elements)


decode_call = decode_run.call


@inline
def decode(kind, to, half, source, elements):
    """Decode consecutive whole blocks to bf16 (half = 1) or float32."""
    decode_call((kind, to, half, source, elements))


@SharedKernel
def pack_slabs(mode, to, kind, raw, row_bytes, across, first, rows, start, columns, slab):
    """Decode a part of a weight slab by slab and pack each."""
    block, size, depth = K.BLOCK[kind], K.SIZE[kind], tiles.tile_depth(mode)
    half, element = (0, 4) if mode == tiles.FLOAT32 else (1, 2)
    high, wide = (ROWS_ACROSS, COLUMNS_ACROSS) if across else (ROWS_ALONG, COLUMNS_ALONG)
    down, along = (rows + high - 1) // high, (columns + wide - 1) // wide
    for step in range(down * along):
        row, column = step // along * high, step % along * wide
        row_count, column_count = min(high, rows - row), min(wide, columns - column)
        source = raw + (first + row) * row_bytes + (start + column) // block * size
        for i in range(row_count):
            decode(kind, slab + i * column_count * element, half, source + i * row_bytes, column_count)
        if across:
            for panel in range(0, column_count, 16):
                target = to + tiles.panel_bytes(mode, column + panel, rows) + row // depth * TILE
                tiles.pack_b(
                    mode,
                    target,
                    slab + panel * element,
                    half,
                    ACROSS,
                    column_count,
                    min(16, column_count - panel),
                    row_count,
                )
        else:
            target = to + tiles.panel_bytes(mode, row, columns) + column // depth * TILE
            tiles.pack_b(mode, target, slab, half, ALONG, column_count, row_count, column_count)


slabs_call = pack_slabs.call


@inline
def pack_quantized(mode, to, kind, raw, row_bytes, across, first, rows, start, columns, slab):
    """Decode and pack a part of a weight."""
    slabs_call((mode, to, kind, raw, row_bytes, across, first, rows, start, columns, slab))
