"""Writes new models from the tensors of others.

A tensor is copied byte for byte, or decoded, changed and encoded again. Both happen some rows at a time, so
memory is bounded, whatever the size of the model.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from llamatrain.config.options import format_flag
from llamatrain.errors import FileError
from llamatrain.gguf import quants
from llamatrain.gguf.constants import QUANT_VERSION, LlamaFileType
from llamatrain.gguf.reader import FileTensor, Gguf
from llamatrain.gguf.types import GgmlType, TensorInfo
from llamatrain.gguf.values import Value, u32
from llamatrain.gguf.writer import create_gguf
from llamatrain.io.madvise import release_pages
from llamatrain.io.mapped_file import MappedFile, verify_unchanged

PANEL = 1 << 21  # weights in memory at a time; with fewer, synchronizing threads costs more than the work


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor of the new file, which takes the name, the shape and the place of one of the base."""

    base: FileTensor
    type: GgmlType

    @property
    def info(self) -> TensorInfo:
        """The tensor's entry in the new file."""
        return TensorInfo(self.base.name, self.type, self.base.shape)


T = TypeVar("T", bound=NewTensor)


# ---- before anything is written --------------------------------------------


def check_decodable(tensor: FileTensor, path: Path) -> None:
    """Raise if a tensor's type cannot be decoded."""
    try:
        quants.decode(np.zeros((1, tensor.type.block_bytes), np.uint8), tensor.type)
    except quants.QuantError as error:
        raise FileError(f"{path}: {tensor.name}: {error}", code=error.code) from None


def check_encodable(name: str, kind: GgmlType, path: Path) -> None:
    """Raise if the type that a tensor gets, or keeps, cannot be encoded."""
    if kind.name not in quants.WRITABLE_TYPES:
        raise FileError(
            f"{path}: {name} is {kind.name}, which can be read but not written; choose another "
            f"{format_flag('type')}, such as q8_0, or f16 if its rows fit no other",
            code="cannot-encode",
        )


# ---- writing ---------------------------------------------------------------


def write_model(
    path: Path,
    base: Gguf,
    tensors: Sequence[T],
    encode: Callable[[T], Iterable[np.ndarray]],
    *,
    kind: GgmlType | None = None,
    files: Iterable[MappedFile] = (),
    progress: Callable[[int], object] = lambda done: None,
) -> None:
    """Write the new file atomically, with the metadata of the base.

    `encode` gives the bytes of a tensor in chunks of rows. `kind` is the type that matrices got; `files` are
    those that are read besides the base; `progress` is called with the number of bytes of each write.
    """
    target = os.path.realpath(path)  # a link is followed
    with (
        create_gguf(target, new_metadata(base, tensors, kind), [tensor.info for tensor in tensors]) as out,
        verify_unchanged([*base.mapped_files, *files]),
    ):
        for tensor in tensors:
            out.write(tensor.base.name, report_progress(encode(tensor), progress))


def new_metadata(base: Gguf, tensors: Iterable[NewTensor], kind: GgmlType | None) -> dict[str, Value]:
    """Return the base's metadata, without what no longer holds: file type and split."""
    values = {key: value for key, value in base.metadata.raw_values.items() if not key.startswith("split.")}
    return state_types(values, (tensor.type for tensor in tensors), kind)


def state_types(
    metadata: Mapping[str, Value], types: Iterable[GgmlType], kind: GgmlType | None
) -> dict[str, Value]:
    """Return metadata that states the types of a file's tensors; `kind` is the one that matrices got."""
    values = dict(metadata)
    if kind:
        values["general.file_type"] = u32(file_type(kind))
    if any(each.block_size > 1 for each in types):
        values.setdefault("general.quantization_version", u32(QUANT_VERSION))
    return values


def file_type(kind: GgmlType) -> LlamaFileType:
    """Return llama.cpp's general.file_type for matrices of a type; for K-quants the one without a mixture."""
    names = LlamaFileType.__members__
    return next(
        names[name]
        for name in (f"ALL_{kind.name}", f"MOSTLY_{kind.name}", f"MOSTLY_{kind.name}_S")
        if name in names
    )


def report_progress(parts: Iterable[np.ndarray], progress: Callable[[int], object]) -> Iterator[np.ndarray]:
    """Yield parts, and report the bytes of each."""
    for part in parts:
        yield part
        progress(part.nbytes)


# ---- reading ---------------------------------------------------------------


def read_panels(tensor: FileTensor) -> Iterator[np.ndarray]:
    """Yield the bytes of a tensor, a panel of rows at a time. Pages of the file are released behind it."""
    rows = tensor.raw.reshape(-1, tensor.raw.shape[-1])
    step = max(1, PANEL // tensor.shape[-1])
    for lo in range(0, len(rows), step):
        yield rows[lo : lo + step]
        release_pages(rows[: lo + step])  # from the beginning: read-ahead maps earlier pages again


def copy_panels(tensor: FileTensor) -> Iterator[np.ndarray]:
    """Yield the bytes of a tensor in memory: writing the map itself would fail in the kernel if it is truncated."""
    return map(np.array, read_panels(tensor))


def is_same(one: FileTensor, other: FileTensor) -> bool:
    """Return True if two tensors have the same type and the same bytes."""
    return one.type is other.type and all(map(np.array_equal, read_panels(one), read_panels(other)))


def decode_panels(tensor: FileTensor, threads: int) -> Iterator[np.ndarray]:
    """Yield the weights of a tensor in float32, a panel of rows at a time."""
    return (quants.decode(panel, tensor.type, threads=threads) for panel in read_panels(tensor))
