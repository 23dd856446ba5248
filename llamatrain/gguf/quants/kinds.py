"""Type numbers for compiled code, and the block sizes of all types."""

from llamatrain.gguf.types import TYPES, type_by_name


def _number(name: str) -> int:
    return type_by_name(name).number


F32, F16, BF16 = map(_number, ("F32", "F16", "BF16"))
Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL = map(_number, ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"))
MXFP4 = _number("MXFP4")
Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS = map(_number, ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"))

BLOCK, SIZE = (
    tuple(getattr(TYPES[number], what) if number in TYPES else 0 for number in range(max(TYPES) + 1))
    for what in ("block_size", "block_bytes")
)

FROM_EXTREMES = frozenset((F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0))
NON_LINEAR = frozenset((IQ4_NL, IQ4_XS))
SEARCHED_SCALES = frozenset((Q2_K, Q3_K, Q4_K, Q5_K, Q6_K)) | NON_LINEAR
BY_IMPORTANCE = SEARCHED_SCALES | {Q4_0, Q4_1, Q5_0, Q5_1}  # types that can be encoded by importance
COMPILED = FROM_EXTREMES | SEARCHED_SCALES | {F32, MXFP4}  # with decoders
IQ4_VALUES = (
    -127,
    -104,
    -83,
    -65,
    -49,
    -35,
    -22,
    -10,
    1,
    13,
    25,
    38,
    53,
    69,
    89,
    113,
)  # the values of the codes of NON_LINEAR types
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the values of its codes
