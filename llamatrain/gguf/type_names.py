"""The names of the types that matrices of a new file may have, as options accept them."""

from typing import Literal

QuantizedName = Literal[
    "q8_0",
    "q6_k",
    "q5_k",
    "q4_k",
    "q3_k",
    "q2_k",
    "q5_1",
    "q5_0",
    "q4_1",
    "q4_0",
    "iq4_nl",
    "iq4_xs",
]
MatrixType = Literal["keep", "f32", "f16", "bf16", QuantizedName]
