"""Repacks the experts of gpt-oss, whose checkpoints have blocks of 32 numbers with 4 bits each and one exponent.

A byte of the checkpoint has two numbers that follow each other; one of GGUF has two that are 16 apart.
"""

from collections.abc import Callable, Iterator

import numpy as np

from llamatrain.errors import FileError
from llamatrain.gguf.types import GgmlType, type_by_name
from llamatrain.importing.sources import Piece, Sources

MXFP4 = type_by_name("MXFP4")
HALF = 16  # bytes of a block in a checkpoint


def find_mxfp4(module: str, sources: Sources) -> list[str]:
    """Return the blocks and the exponents of a stack, if the checkpoint has them."""
    names = [f"{module}_blocks", f"{module}_scales"]
    return names if all(name in sources for name in names) else []


def repack_mxfp4(
    name: str, shape: tuple[int, ...], part: tuple[int, int], places: list[str], sources: Sources
) -> tuple[GgmlType, Callable[[], Iterator[Piece]]]:
    """Return the type of a stack of experts, and a function that gives its bytes."""
    number, count = part
    experts, rows, columns = shape
    expected = (experts, rows * count, columns // MXFP4.block_size)
    blocks, exponents = (sources.use(place) for place in places)
    if (blocks.shape, exponents.shape) != ((*expected, HALF), expected) or {
        blocks.dtype,
        exponents.dtype,
    } != {"U8"}:
        raise FileError(
            f"{sources.path}: the blocks and exponents of {name} must be U8 {[*expected, HALF]} and {[*expected]} "
            f"(got {blocks.dtype} {[*blocks.shape]} and {exponents.dtype} {[*exponents.shape]})",
            code="wrong-tensor-shape",
        )

    def load() -> Iterator[Piece]:
        """Yield the bytes of each expert."""
        packed, scales = blocks.raw.reshape(blocks.shape), exponents.raw.reshape(exponents.shape)
        for expert in range(experts):
            yield Piece(MXFP4, join_blocks(packed[expert, number::count], scales[expert, number::count]))

    return MXFP4, load


def join_blocks(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the blocks of GGUF: an exponent, and then bytes with the numbers i and i + 16."""
    codes = np.stack([packed & 0x0F, packed >> 4], axis=-1).reshape(*packed.shape[:-1], 2 * HALF)
    joined = codes[..., :HALF] | codes[..., HALF:] << 4
    return np.concatenate([scales[..., None], joined], axis=-1)
