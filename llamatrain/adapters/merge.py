"""Merges adapters into a base, some rows at a time: weights without an adapter are copied byte for byte.

A weight that has one, or gets another type, is decoded to float32, changed, and encoded again. So memory is
bounded, whatever the size of the model.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llamatrain.adapters.adapter import Adapter
from llamatrain.gguf import quants
from llamatrain.gguf.imatrix import importance_of_rows
from llamatrain.gguf.reader import Gguf
from llamatrain.gguf.rewrite import (
    NewTensor,
    check_decodable,
    check_encodable,
    copy_panels,
    decode_panels,
    write_model,
)
from llamatrain.gguf.types import GgmlType

NO_IMPORTANCES: Mapping[str, np.ndarray] = {}


@dataclass(frozen=True, slots=True)
class MergedTensor(NewTensor):
    """A tensor of the new file, and the adapters that change it."""

    adapters: tuple[Adapter, ...]

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


@dataclass(slots=True)
class Rounding:
    """Sums of squares of the rounding error, and of the change that was wanted."""

    error: float = 0.0
    change: float = 0.0

    @property
    def share(self) -> float:
        """The rounding error relative to the change."""
        return math.sqrt(self.error / self.change) if self.change else 0.0


def plan_merge(base: Gguf, adapters: Sequence[Adapter], types: Mapping[str, GgmlType]) -> list[MergedTensor]:
    """Return the tensors of the new file, given their types; an adapter with scale 0 changes nothing."""
    tensors = []
    for name, new_type in types.items():
        used_adapters = tuple(
            adapter for adapter in adapters if name in adapter.pairs and adapter.pairs[name].scale
        )
        tensor = MergedTensor(base.tensors[name], new_type, used_adapters)
        if not tensor.is_copy:
            check_encodable(name, tensor.type, base.path)
            check_decodable(tensor.base, base.path)
        tensors.append(tensor)
    return tensors


def write_merged(
    path: Path,
    base: Gguf,
    tensors: Sequence[MergedTensor],
    kind: GgmlType | None = None,
    *,
    importances: Mapping[str, np.ndarray] = NO_IMPORTANCES,
    threads: int = 1,
    progress: Callable[[int], object] = lambda done: None,
) -> dict[str, Rounding]:
    """Write the new file atomically; `progress` is called with the number of bytes of each write.

    `importances` are those of weights that have some (`gguf/imatrix.py`).
    Return the rounding of weights that keep a quantized type, by name.
    """
    roundings = {tensor.base.name: Rounding() for tensor in tensors if tensor.is_rounded}
    write_model(
        path,
        base,
        tensors,
        lambda tensor: encode_chunks(
            tensor, threads, roundings.get(tensor.base.name), importances.get(tensor.base.name)
        ),
        kind=kind,
        progress=progress,
    )
    return roundings


def encode_chunks(
    tensor: MergedTensor,
    threads: int,
    rounding: Rounding | None = None,
    importance: np.ndarray | None = None,
) -> Iterator[np.ndarray]:
    """Yield the bytes of a tensor in chunks of rows."""
    if tensor.is_copy:
        yield from copy_panels(tensor.base)
        return
    name, row = tensor.base.name, 0
    for values in decode_panels(tensor.base, threads):
        change = add_adapters(values, tensor.adapters, name, row)
        weighting = (
            None
            if importance is None
            else importance_of_rows(importance, tensor.base, row, row + len(values))
        )
        encoded = quants.encode(
            values, tensor.type, importance=weighting, threads=threads, name=f"{name}, merged"
        )
        if rounding and change is not None:
            rounding.change += float(np.vdot(change, change))
            error = np.subtract(
                quants.decode(encoded, tensor.type, out=change, threads=threads), values, out=values
            )
            rounding.error += float(np.vdot(error, error))
        yield encoded
        row += len(values)


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
