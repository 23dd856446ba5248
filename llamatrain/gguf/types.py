"""The tensor types of GGUF. A row is a sequence of blocks, each of a fixed number of elements and bytes."""

from dataclasses import dataclass
from math import prod

from llamatrain.gguf.constants import BLOCK_LAYOUTS


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A tensor type of ggml."""

    name: str
    number: int
    block_size: int  # elements in a block
    block_bytes: int  # bytes of a block

    def row_bytes(self, elements: int) -> int:
        """Return the bytes of a row of elements, which must be whole blocks."""
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
    """Return the type of ggml's name, such as `type_by_name("Q4_K")`. Raise KeyError if there is none."""
    return _NAMES[name]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The name, type and shape of a tensor."""

    name: str
    type: GgmlType
    shape: tuple[int, ...]  # numpy's order: the last axis consists of blocks

    @property
    def elements(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the data in bytes."""
        return prod(self.shape[:-1]) * self.type.row_bytes(self.shape[-1])
