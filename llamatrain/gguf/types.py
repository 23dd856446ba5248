"""The types that a tensor of a GGUF file may have: a row is a run of blocks, each of so many elements in so many bytes."""

from dataclasses import dataclass
from math import prod

from llamatrain.gguf.constants import BLOCK_LAYOUTS


@dataclass(frozen=True, slots=True)
class GgmlType:
    name: str
    number: int
    block_size: int  # elements in a block
    block_bytes: int  # bytes of a block

    def row_bytes(self, elements: int) -> int:
        """Bytes of a row of so many elements, whole blocks of them."""
        blocks, rest = divmod(elements, self.block_size)
        if rest:
            raise ValueError(
                f"a row of {elements} elements is not made of whole {self.name} blocks of {self.block_size}"
            )
        return blocks * self.block_bytes


TYPES: dict[int, GgmlType] = {
    number: GgmlType(name, number, block, size) for name, number, block, size in BLOCK_LAYOUTS
}
_NAMES = {kind.name: kind for kind in TYPES.values()}


def type_by_name(name: str) -> GgmlType:
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
