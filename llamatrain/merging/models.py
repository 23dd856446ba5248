"""Writes a merge of whole models, tensor by tensor and a panel of rows at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llamatrain.gguf import quants
from llamatrain.gguf.reader import FileTensor, Gguf
from llamatrain.gguf.rewrite import (
    NewTensor,
    check_decodable,
    check_encodable,
    copy_panels,
    decode_panels,
    is_same,
    write_model,
)
from llamatrain.gguf.types import GgmlType
from llamatrain.merging.methods import Panels, merge
from llamatrain.merging.recipe import Recipe


@dataclass(frozen=True, slots=True)
class MixedTensor(NewTensor):
    """A tensor of the new file."""

    versions: tuple[FileTensor, ...]  # in the models that have a weight
    needs_base: bool  # the method reads `base` too
    is_copy: bool  # all that is read is the same to the byte, and so is the result

    @property
    def sources(self) -> tuple[FileTensor, ...]:
        """The tensors that are read."""
        return (self.base, *self.versions) if self.needs_base else self.versions


# ---- before anything is written --------------------------------------------


def plan_merge(
    first: Gguf, models: Sequence[Gguf], types: Mapping[str, GgmlType], recipe: Recipe
) -> list[MixedTensor]:
    """Return the tensors of the new file, given their types; `models` are those of the recipe's sources."""
    tensors = []
    for name, new_type in types.items():
        base, versions = first.tensors[name], tuple(model.tensors[name] for model in models)
        sources = (base, *versions) if recipe.needs_base else versions
        is_copy = (
            recipe.keeps_equal
            and sources[0].type is new_type
            and all(is_same(sources[0], other) for other in sources[1:])
        )
        if not is_copy:
            check_encodable(name, new_type, first.path)
            for file, source in zip((first, *models), (base, *versions), strict=True):
                check_decodable(source, file.path)
        tensors.append(MixedTensor(base, new_type, versions, recipe.needs_base, is_copy))
    return tensors


# ---- writing ---------------------------------------------------------------


def write_merge(
    path: Path,
    first: Gguf,
    models: Sequence[Gguf],
    tensors: Sequence[MixedTensor],
    recipe: Recipe,
    kind: GgmlType | None,
    *,
    threads: int,
    progress: Callable[[int], object],
) -> None:
    """Write the new file atomically, with the metadata of the first model.

    `progress` is called with the number of bytes of each write.
    """

    def encode(tensor: MixedTensor) -> Iterator[np.ndarray]:
        """Yield the bytes of a tensor."""
        return copy_panels(tensor.sources[0]) if tensor.is_copy else encode_merged(tensor, recipe, threads)

    files = [file for model in models for file in model.mapped_files]
    write_model(path, first, tensors, encode, kind=kind, files=files, progress=progress)


def encode_merged(tensor: MixedTensor, recipe: Recipe, threads: int) -> Iterator[np.ndarray]:
    """Yield the bytes of a merged tensor in chunks of rows."""

    def reader(source: FileTensor) -> Panels:
        """Return what reads a tensor in float64."""
        return lambda: (panel.astype(np.float64) for panel in decode_panels(source, threads))

    name = tensor.base.name
    base = reader(tensor.base) if tensor.needs_base else None
    with np.errstate(over="ignore", invalid="ignore"):  # the encoder says which weight is not finite
        for values in merge(recipe, name, [reader(version) for version in tensor.versions], base):
            yield quants.encode(
                values.astype(np.float32), tensor.type, threads=threads, name=f"{name}, merged"
            )
