"""A base and its adapters made one model file, some rows at a time: what no adapter touches is copied, byte for byte.

A weight that is touched, or gets another type, is decoded to float32, what its adapters add is added, and the sum is
encoded. So the memory that it takes is that of some rows, whatever the size of the model.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
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

PANEL = (
    1 << 21
)  # weights that are in memory at once; of fewer, the threads' meetings cost more than their work


@dataclass(frozen=True, slots=True)
class MergedTensor:
    """A tensor of the new file."""

    base: FileTensor
    type: GgmlType
    adapters: tuple[Adapter, ...]  # that touch it

    @property
    def info(self) -> TensorInfo:
        return TensorInfo(self.base.name, self.type, self.base.shape)

    @property
    def is_copy(self) -> bool:
        return not self.adapters and self.type is self.base.type

    @property
    def is_rounded(self) -> bool:
        """What is added may be less than the steps of the type, which the base has already."""
        return bool(self.adapters) and self.type is self.base.type and self.type.name != "F32"

    @property
    def rows(self) -> np.ndarray:
        """Of bytes, in the base's file."""
        return self.base.raw.reshape(-1, self.base.raw.shape[-1])


@dataclass(slots=True)
class Rounding:
    """How far a weight that was written is from what was wanted, and how far that is from the base: sums of squares."""

    error: float = 0.0
    change: float = 0.0

    @property
    def share(self) -> float:
        return math.sqrt(self.error / self.change) if self.change else 0.0


def plan_merge(base: Gguf, adapters: Sequence[Adapter], kind: GgmlType | None = None) -> list[MergedTensor]:
    """What the new file is made of, in the base's order; an adapter with a scale of 0 touches nothing.

    With a type, matrices get it if their rows are whole blocks of it; all else keeps its own.
    """
    tensors = []
    for name, tensor in base.tensors.items():
        used_adapters = tuple(
            adapter for adapter in adapters if name in adapter.pairs and adapter.pairs[name].scale
        )
        new_type = (
            kind
            if kind and len(tensor.shape) == 2 and tensor.shape[1] % kind.block_size == 0
            else tensor.type
        )
        tensors.append(MergedTensor(tensor, new_type, used_adapters))
    if kind and not any(merged.type is kind for merged in tensors):
        raise UsageError(
            f"{format_flag('type')} {kind.name.lower()}: no matrix of {base.path} has rows of whole blocks of {kind.block_size}"
        )
    for merged in tensors:
        check_encodable(merged, base.path)
    return tensors


def check_encodable(tensor: MergedTensor, path: Path) -> None:
    """What will have to be decoded and encoded can be."""
    if tensor.is_copy:
        return
    if tensor.type.name not in quants.WRITABLE_TYPES:
        raise FileError(
            f"{path}: {tensor.base.name} is {tensor.type.name}, which can be read but not written: "
            f"{format_flag('type')} names another one, such as q8_0, or f16 if its rows fit no other"
        )
    try:
        quants.decode(np.zeros((1, tensor.base.type.block_bytes), np.uint8), tensor.base.type)
    except quants.QuantError as error:
        raise FileError(f"{path}: {tensor.base.name}: {error}") from None


def write_merged(
    path: Path,
    base: Gguf,
    tensors: Sequence[MergedTensor],
    kind: GgmlType | None = None,
    *,
    threads: int = 1,
    progress: Callable[[int], object] = lambda done: None,
) -> dict[str, Rounding]:
    """The new file, which takes its name when it is whole; `progress` is told of bytes that were written.

    What rounding does to the weights that keep a quantised type is told, by their names.
    """
    roundings = {tensor.base.name: Rounding() for tensor in tensors if tensor.is_rounded}
    target = os.path.realpath(path)  # where a link leads that somebody named for it
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
    """The base's, but for what tells of types, and of a split that is no more."""
    values = {key: value for key, value in base.metadata.raw_values.items() if not key.startswith("split.")}
    if kind:
        values["general.file_type"] = u32(file_type(kind))
    if any(tensor.type.block_size > 1 for tensor in tensors):
        values.setdefault("general.quantization_version", u32(QUANT_VERSION))
    return values


def file_type(kind: GgmlType) -> LlamaFileType:
    """What llama.cpp calls files whose matrices are of a type, general.file_type; of K-quants those without a mixture."""
    names = LlamaFileType.__members__
    return next(
        names[name]
        for name in (f"ALL_{kind.name}", f"MOSTLY_{kind.name}", f"MOSTLY_{kind.name}_S")
        if name in names
    )


def encode_chunks(
    tensor: MergedTensor, threads: int, rounding: Rounding | None = None
) -> Iterator[np.ndarray]:
    name, rows = tensor.base.name, tensor.rows
    step = max(1, PANEL // tensor.base.shape[-1])
    for lo in range(0, len(rows), step):
        block = rows[lo : lo + step]
        if tensor.is_copy:
            yield np.array(
                block
            )  # the system, unlike this process, would not be told what happened to a file cut short
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
        release_pages(
            rows[: lo + step]
        )  # from the beginning: reading on maps some pages before those that are read


def report_progress(parts: Iterable[np.ndarray], progress: Callable[[int], object]) -> Iterator[np.ndarray]:
    for part in parts:
        yield part
        progress(part.nbytes)


def add_adapters(
    values: np.ndarray, adapters: Iterable[Adapter], name: str, lo: int = 0
) -> np.ndarray | None:
    """To some rows of a weight, from one on, what adapters add; that is given back."""
    change = None
    with np.errstate(over="ignore", invalid="ignore"):
        for adapter in adapters:
            delta = adapter.delta(name, lo, lo + len(values))
            change = delta if change is None else np.add(change, delta, out=change)
        if change is not None:
            values += change
    return change
