"""The size of tiles, and of the part of C that a vector kernel holds in registers (llvm/microkernel.py)."""

from llamatrain.platform.cpu import enabled_units, vector_width

TILE = 1024  # bytes
ROW = 64  # bytes of a tile's row
NEAR_BYTES = 1 << 20  # bytes of B that the tile unit reads for some rows of C before the next rows

# The part of C that a vector kernel computes: columns, and rows of a panel of 16, the last of which may be fewer.
# With narrow registers it is the columns of one panel, and as many rows as there are registers for their sums and
# for the words of A and B in use: of 16 registers of 8 numbers 12 hold sums, of 32 registers of 4 numbers 16.
COLUMNS, ROWS, LAST_ROWS = {16: (32, 8, 8), 8: (16, 6, 4), 4: (16, 4, 4)}[vector_width()]
NARROW_ROWS = 16 if vector_width() == 16 else ROWS  # if C has 16 columns

PLAIN_ROWS = 8  # of operands that are not packed: as many sums as keep both multipliers busy


def choose_int8_rows() -> int:
    """Return the rows of C in a vector kernel for 8-bit integers: fewer if products need registers, too."""
    units = enabled_units()
    if vector_width() == 16:
        return 8
    if vector_width() == 8:
        return 6 if "avxvnni" in units else 4
    return 4 if units & {"dotprod", "i8mm"} else 2


# Of 8-bit integers: the same, and the bytes in front of a block's tiles.
INT8_ROWS, INT8_COLUMNS = choose_int8_rows(), 32 if vector_width() == 16 else 16
INT8_LAST_ROWS = 16 % INT8_ROWS or INT8_ROWS
INT8_HEADER = 128
INT8_BY_TILES = "amx" in enabled_units()  # the tile unit multiplies them
