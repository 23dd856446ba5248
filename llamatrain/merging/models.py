"""Writes a merge of whole models, tensor by tensor and a panel of rows at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llamatrain.errors import FileError
from llamatrain.gguf import quants
from llamatrain.gguf.parser import quote
from llamatrain.gguf.reader import FileTensor, Gguf
from llamatrain.gguf.rewrite import (
    NewTensor,
    check_decodable,
    check_encodable,
    copy_panels,
    decode_panels,
    read_panels,
    write_model,
)
from llamatrain.gguf.types import GgmlType
from llamatrain.merging.methods import Panels, merge
from llamatrain.merging.recipe import Recipe

TOKENS, MERGES = "tokenizer.ggml.tokens", "tokenizer.ggml.merges"


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


def is_same(one: FileTensor, other: FileTensor) -> bool:
    """Return True if two tensors have the same type and the same bytes."""
    return one.type is other.type and all(map(np.array_equal, read_panels(one), read_panels(other)))


# ---- before anything is written --------------------------------------------


def check_alike(first: Gguf, other: Gguf) -> None:
    """Raise unless two models have the same architecture, tensors, shapes and vocabulary."""
    one, two = (file.get_value("general.architecture", str) for file in (first, other))
    if one != two:
        raise FileError(
            f"{other.path}: its architecture is {quote(two)}, but that of {first.path} is {quote(one)}; "
            "only models of one architecture can be merged",
            code="models-differ",
        )
    for name, tensor in first.tensors.items():
        found = other.tensors.get(name)
        if found is None:
            raise FileError(
                f"{other.path}: it has no tensor {quote(name)}, but {first.path} has one",
                code="models-differ",
            )
        if found.shape != tensor.shape:
            raise FileError(
                f"{other.path}: the shape of {quote(name)} is {list(found.shape)}, but in {first.path} it is "
                f"{list(tensor.shape)}; only models with the same shapes can be merged",
                code="models-differ",
            )
    if more := [name for name in other.tensors if name not in first.tensors]:
        raise FileError(
            f"{other.path}: it has a tensor {quote(more[0])}, but {first.path} has none", code="models-differ"
        )
    check_vocabulary(first, other)


def check_vocabulary(first: Gguf, other: Gguf) -> None:
    """Raise unless two models have the same tokens and merges."""
    for key in (TOKENS, MERGES):
        one, two = (file.metadata.raw_values.get(key) for file in (first, other))
        if (one is None and two is None) or (one and two and bytes(one.raw) == bytes(two.raw)):
            continue
        raise FileError(
            f"{other.path}: {key} differs from that of {first.path}{describe_value(first, other, key)}; only models with the same "
            "vocabulary can be merged",
            code="models-differ",
        )


def describe_value(first: Gguf, other: Gguf, key: str) -> str:
    """Return the first value of a list that differs between two files, in parentheses, or an empty text."""
    one, two = (file.metadata.get(key) for file in (first, other))
    if not (isinstance(one, list) and isinstance(two, list)):
        return ""
    if len(one) != len(two):
        return f" ({len(two)} values, and there {len(one)})"
    number = next(i for i, pair in enumerate(zip(one, two, strict=True)) if pair[0] != pair[1])
    return f" (value {number} is {quote(two[number])}, and there {quote(one[number])})"


def differing_keys(first: Gguf, other: Gguf) -> list[str]:
    """Return the keys of the architecture whose values differ between two models."""
    prefix = f"{first.get_value('general.architecture', str)}."
    keys = [file.metadata.raw_values for file in (first, other)]
    return sorted(
        key
        for key in keys[0].keys() | keys[1].keys()
        if key.startswith(prefix)
        and not (key in keys[0] and key in keys[1] and bytes(keys[0][key].raw) == bytes(keys[1][key].raw))
    )


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
