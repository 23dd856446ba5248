"""An opened GGUF file: metadata by key, tensors by name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from llamatrain.errors import FileError
from llamatrain.gguf.types import TensorInfo
from llamatrain.gguf.values import Kind, Value
from llamatrain.io.mapped_file import MappedFile, mapped_files

T = TypeVar("T", int, float, bool, str, list, np.ndarray)


class Metadata(Mapping[str, Any]):
    """Metadata by key, decoded at each access. `raw_values` holds the values as they are in the file."""

    def __init__(self, raw_values: dict[str, Value]) -> None:
        self.raw_values = raw_values

    def __getitem__(self, key: str) -> Any:
        return self.raw_values[key].decode()

    def get_text(self, key: str) -> str | None:
        """Return the value of a key if it is a string, else None."""
        value = self.raw_values.get(key)
        return value.decode() if value and value.kind is Kind.STRING else None

    def __iter__(self) -> Iterator[str]:
        return iter(self.raw_values)

    def __len__(self) -> int:
        return len(self.raw_values)


@dataclass(frozen=True, slots=True)
class FileTensor(TensorInfo):
    """A tensor whose data lies in a mapped file."""

    offset: int  # in the file
    file: np.ndarray = field(repr=False, compare=False)

    @property
    def raw(self) -> np.ndarray:
        """The bytes in the file, not copied: the tensor's shape, with the bytes of a row as the last axis."""
        data = self.file[self.offset : self.offset + self.nbytes]
        return data.reshape(*self.shape[:-1], self.type.row_bytes(self.shape[-1]))


@dataclass(frozen=True, slots=True)
class Gguf:
    """The contents of a model file, or of all files of a split model."""

    path: Path
    metadata: Metadata
    tensors: dict[str, FileTensor]

    def get_value(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Return the value of a key.

        Raise FileError if its type is not `kind`, or if it is missing and has no default.
        """
        if key not in self.metadata:
            if default is None:
                raise FileError(f"{self.path}: the key {key} is missing", code="missing-key")
            return default
        value = self.metadata[key]
        if type(value) is not kind:
            raise FileError(
                f"{self.path}: {key} must be of type {kind.__name__} (got {self.metadata.raw_values[key].kind.name})",
                code="wrong-value-type",
            )
        return value

    @property
    def mapped_files(self) -> list[MappedFile]:
        """The mapped files that the tensors lie in."""
        return mapped_files(tensor.file for tensor in self.tensors.values())

    @property
    def kind(self) -> str:
        """The contents: model, adapter, control vector, importance matrix, checkpoint, vocabulary or other."""
        general_type = self.metadata.get_text("general.type") if "general.type" in self.metadata else "model"
        if general_type == "adapter":
            return "adapter"
        if general_type == "imatrix":
            return "importance matrix"
        if self.metadata.get_text("general.architecture") == "controlvector":
            return "control vector"
        if "training.type" in self.metadata or "training.iteration_count" in self.metadata:
            return "checkpoint"
        if "general.architecture" not in self.metadata or general_type != "model":
            return "other"
        return (
            "model" if self.tensors else "vocabulary" if "tokenizer.ggml.model" in self.metadata else "other"
        )
