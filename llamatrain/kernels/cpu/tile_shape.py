"""The tiles that products are made of, and how much of a result is in the work at once (`kernels/cpu/llvm/microkernel.py`)."""

from llamatrain.platform.cpu import vector_width

TILE = 1024  # bytes
ROW = 64  # bytes of a tile's row

# Rows of C that a vector kernel holds, 32 or 16 columns wide: sums take half the registers, what feeds them the rest.
SUMS = 16 if vector_width() == 16 else 8
WIDE_ROWS = max(1, SUMS * vector_width() // 32)
NARROW_ROWS = 2 * WIDE_ROWS
