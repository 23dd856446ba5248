"""The types that a tensor of a GGUF file may have: a row is a run of blocks, each of so many elements in so many bytes."""

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class GgmlType:
    name: str
    number: int
    block: int  # elements in a block
    size: int  # bytes of a block

    def row_bytes(self, elements: int) -> int:
        """Bytes of a row of so many elements, whole blocks of them."""
        blocks, rest = divmod(elements, self.block)
        if rest:
            raise ValueError(f"a row of {elements} elements is not made of whole {self.name} blocks of {self.block}")
        return blocks * self.size


# Numbers that are missing belonged to types that ggml has given up.
TYPES: dict[int, GgmlType] = {
    kind.number: kind
    for kind in (
        GgmlType("F32", 0, 1, 4),
        GgmlType("F16", 1, 1, 2),
        GgmlType("Q4_0", 2, 32, 18),
        GgmlType("Q4_1", 3, 32, 20),
        GgmlType("Q5_0", 6, 32, 22),
        GgmlType("Q5_1", 7, 32, 24),
        GgmlType("Q8_0", 8, 32, 34),
        GgmlType("Q8_1", 9, 32, 40),
        GgmlType("Q2_K", 10, 256, 84),
        GgmlType("Q3_K", 11, 256, 110),
        GgmlType("Q4_K", 12, 256, 144),
        GgmlType("Q5_K", 13, 256, 176),
        GgmlType("Q6_K", 14, 256, 210),
        GgmlType("Q8_K", 15, 256, 292),
        GgmlType("IQ2_XXS", 16, 256, 66),
        GgmlType("IQ2_XS", 17, 256, 74),
        GgmlType("IQ3_XXS", 18, 256, 98),
        GgmlType("IQ1_S", 19, 256, 50),
        GgmlType("IQ4_NL", 20, 32, 18),
        GgmlType("IQ3_S", 21, 256, 110),
        GgmlType("IQ2_S", 22, 256, 82),
        GgmlType("IQ4_XS", 23, 256, 136),
        GgmlType("I8", 24, 1, 1),
        GgmlType("I16", 25, 1, 2),
        GgmlType("I32", 26, 1, 4),
        GgmlType("I64", 27, 1, 8),
        GgmlType("F64", 28, 1, 8),
        GgmlType("IQ1_M", 29, 256, 56),
        GgmlType("BF16", 30, 1, 2),
        GgmlType("TQ1_0", 34, 256, 54),
        GgmlType("TQ2_0", 35, 256, 66),
        GgmlType("MXFP4", 39, 32, 17),
        GgmlType("NVFP4", 40, 64, 36),
        GgmlType("Q1_0", 41, 128, 18),
    )
}

_NAMES = {kind.name: kind for kind in TYPES.values()}


def by_name(name: str) -> GgmlType:
    """The type called so, in capitals as ggml has it: `by_name("Q4_K")`; a KeyError where there is none."""
    return _NAMES[name]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    name: str
    type: GgmlType
    shape: tuple[int, ...]  # numpy's order: the last axis is the one that lies in blocks

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return prod(self.shape[:-1]) * self.type.row_bytes(self.shape[-1])
