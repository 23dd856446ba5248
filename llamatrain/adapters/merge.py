"""Merges adapters into a base, some rows at a time: weights without an adapter are copied byte for byte.

A weight that has one, or gets another type, is decoded to float32, changed, and encoded again. So memory is
bounded, whatever the size of the model.
"""

import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llamatrain.adapters.adapter import Adapter
from llamatrain.config.options import format_flag
from llamatrain.errors import FileError, UsageError
from llamatrain.gguf import quants
from llamatrain.gguf.constants import QUANT_VERSION, LlamaFileType
from llamatrain.gguf.reader import FileTensor, Gguf
from llamatrain.gguf.types import GgmlType, TensorInfo
from llamatrain.gguf.values import Value, u32
from llamatrain.gguf.writer import create_gguf
from llamatrain.io.madvise import release_pages
from llamatrain.io.mapped_file import verify_unchanged

PANEL = 1 << 21  # weights in memory at a time; with fewer, synchronizing threads costs more than the work


@dataclass(frozen=True, slots=True)
class MergedTensor:
    """A tensor of the new file."""

    base: FileTensor
    type: GgmlType
    adapters: tuple[Adapter, ...]  # that change it

    @property
    def info(self) -> TensorInfo:
        """The tensor's entry in the new file."""
        return TensorInfo(self.base.name, self.type, self.base.shape)

    @property
    def is_copy(self) -> bool:
        """True if the bytes are copied."""
        return not self.adapters and self.type is self.base.type

    @property
    def is_rounded(self) -> bool:
        """True if the change is rounded to the steps of the base's type.

        These steps may be coarser than the change.
        """
        return bool(self.adapters) and self.type is self.base.type and self.type.name != "F32"

    @property
    def rows(self) -> np.ndarray:
        """The bytes of the base, by row."""
        return self.base.raw.reshape(-1, self.base.raw.shape[-1])


@dataclass(slots=True)
class Rounding:
    """Sums of squares of the rounding error, and of the change that was wanted."""

    error: float = 0.0
    change: float = 0.0

    @property
    def share(self) -> float:
        """The rounding error relative to the change."""
        return math.sqrt(self.error / self.change) if self.change else 0.0


def plan_merge(
    base: Gguf,
    adapters: Sequence[Adapter],
    kind: GgmlType | None = None,
    unchanged: Collection[str] = (),
    stacks: Collection[str] = (),
) -> list[MergedTensor]:
    """Return the tensors of the new file in the base's order; an adapter with scale 0 changes nothing.

    With a type, matrices whose rows are whole blocks get it, except `unchanged` ones, and so do `stacks` of
    matrices; all else keeps its own.
    """
    tensors = []
    for name, tensor in base.tensors.items():
        used_adapters = tuple(
            adapter for adapter in adapters if name in adapter.pairs and adapter.pairs[name].scale
        )
        new_type = (
            kind
            if kind
            and name not in unchanged
            and (len(tensor.shape) == 2 or name in stacks)
            and tensor.shape[-1] % kind.block_size == 0
            else tensor.type
        )
        tensors.append(MergedTensor(tensor, new_type, used_adapters))
    if kind and not any(merged.type is kind for merged in tensors):
        raise UsageError(
            f"{format_flag('type')} {kind.name.lower()} fits no matrix of {base.path}: rows "
            f"must be multiples of {kind.block_size}",
            code="type-does-not-fit",
        )
    for merged in tensors:
        check_encodable(merged, base.path)
    return tensors


def check_encodable(tensor: MergedTensor, path: Path) -> None:
    """Raise if a tensor's types cannot be decoded and encoded."""
    if tensor.is_copy:
        return
    if tensor.type.name not in quants.WRITABLE_TYPES:
        raise FileError(
            f"{path}: {tensor.base.name} is {tensor.type.name}, which can be read but not "
            f"written; choose another {format_flag('type')}, such as q8_0, or f16 if its rows "
            "fit no other",
            code="cannot-encode",
        )
    try:
        quants.decode(np.zeros((1, tensor.base.type.block_bytes), np.uint8), tensor.base.type)
    except quants.QuantError as error:
        raise FileError(f"{path}: {tensor.base.name}: {error}", code=error.code) from None


def write_merged(
    path: Path,
    base: Gguf,
    tensors: Sequence[MergedTensor],
    kind: GgmlType | None = None,
    *,
    threads: int = 1,
    progress: Callable[[int], object] = lambda done: None,
) -> dict[str, Rounding]:
    """Write the new file atomically; `progress` is called with the number of bytes of each write.

    Return the rounding of weights that keep a quantized type, by name.
    """
    roundings = {tensor.base.name: Rounding() for tensor in tensors if tensor.is_rounded}
    target = os.path.realpath(path)  # a link is followed
    with (
        create_gguf(target, merged_metadata(base, tensors, kind), [tensor.info for tensor in tensors]) as out,
        verify_unchanged(base.mapped_files),
    ):
        for tensor in tensors:
            out.write(
                tensor.base.name,
                report_progress(encode_chunks(tensor, threads, roundings.get(tensor.base.name)), progress),
            )
    return roundings


def merged_metadata(base: Gguf, tensors: Iterable[MergedTensor], kind: GgmlType | None) -> dict[str, Value]:
    """Return the base's metadata, without what no longer holds: file type and split."""
    values = {key: value for key, value in base.metadata.raw_values.items() if not key.startswith("split.")}
    if kind:
        values["general.file_type"] = u32(file_type(kind))
    if any(tensor.type.block_size > 1 for tensor in tensors):
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


def encode_chunks(
    tensor: MergedTensor, threads: int, rounding: Rounding | None = None
) -> Iterator[np.ndarray]:
    """Yield the bytes of a tensor in chunks of rows."""
    name, rows = tensor.base.name, tensor.rows
    step = max(1, PANEL // tensor.base.shape[-1])
    for lo in range(0, len(rows), step):
        block = rows[lo : lo + step]
        if tensor.is_copy:
            # copied: writing the map itself would fail in the kernel if the file is truncated
            yield np.array(block)
        else:
            values = quants.decode(block, tensor.base.type, threads=threads)
            change = add_adapters(values, tensor.adapters, name, lo)
            encoded = quants.encode(values, tensor.type, threads=threads, name=f"{name}, merged")
            if rounding and change is not None:
                rounding.change += float(np.vdot(change, change))
                error = np.subtract(
                    quants.decode(encoded, tensor.type, out=change, threads=threads), values, out=values
                )
                rounding.error += float(np.vdot(error, error))
            yield encoded
        release_pages(rows[: lo + step])  # from the beginning: read-ahead maps earlier pages again


def report_progress(parts: Iterable[np.ndarray], progress: Callable[[int], object]) -> Iterator[np.ndarray]:
    """Yield parts, and report the bytes of each."""
    for part in parts:
        yield part
        progress(part.nbytes)


def add_adapters(
    values: np.ndarray, adapters: Iterable[Adapter], name: str, lo: int = 0
) -> np.ndarray | None:
    """Add the adapters to some rows of a weight, from row `lo` on; return what was added."""
    change = None
    with np.errstate(over="ignore", invalid="ignore"):
        for adapter in adapters:
            delta = adapter.delta(name, lo, lo + len(values))
            change = delta if change is None else np.add(change, delta, out=change)
        if change is not None:
            values += change
    return change
