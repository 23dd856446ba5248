"""Describes further formats of adapter files, which extension packages register."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamatrain.adapters.adapter import Adapter
from llamatrain.extensions import load_extensions
from llamatrain.gguf.types import TensorInfo


@dataclass(frozen=True, kw_only=True)
class AdapterFormat:
    """A format of adapter files, recognized by the first four bytes."""

    name: str
    magics: tuple[bytes, ...]
    read: Callable[[Path], Adapter | None]  # None: the file has another format
    list_tensors: Callable[[Path], tuple[dict[str, Any], list[TensorInfo]]] | None = None


def formats_of(magic: bytes) -> list[AdapterFormat]:
    """Return the registered formats with this magic."""
    return [
        format_
        for formats in load_extensions("adapter_formats")
        for format_ in formats
        if magic in format_.magics
    ]
