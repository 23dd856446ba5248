"""The size of tiles, and of the part of C that a vector kernel holds in registers (llvm/microkernel.py)."""

from llamatrain.platform.cpu import vector_width

TILE = 1024  # bytes
ROW = 64  # bytes of a tile's row

# Rows of C in a vector kernel, 32 or 16 columns wide: sums take half of the registers, operands the rest.
SUMS = 16 if vector_width() == 16 else 8
WIDE_ROWS = max(1, SUMS * vector_width() // 32)
NARROW_ROWS = 2 * WIDE_ROWS
