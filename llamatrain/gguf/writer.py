"""Writes GGUF files as a stream: first the metadata and the list of tensors, then the data of each tensor."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from llamatrain.errors import FileError
from llamatrain.gguf.constants import ALIGNMENT, MAGIC, VERSION
from llamatrain.gguf.parser import quote
from llamatrain.gguf.types import TensorInfo
from llamatrain.gguf.values import LENGTH, U32, Value, encode_string
from llamatrain.io.atomic_write import AtomicFile

MAX_NAME_BYTES = 63  # bytes of a tensor's name: llama.cpp refuses longer ones


@contextmanager
def create_gguf(
    path: str | Path,
    metadata: Mapping[str, Value],
    tensors: Iterable[TensorInfo],
    check: Callable[[Path], object] | None = None,
) -> Iterator["Writer"]:
    """Create a GGUF file, which gets its name when the `with` block ends without an error.

    To carry over the metadata of another file: `{**base.metadata.raw_values, "general.name":
    string("mine")}`. `check` is called with the complete file before it gets its name.
    """
    infos = list(tensors)
    alignment = metadata["general.alignment"].decode() if "general.alignment" in metadata else ALIGNMENT
    if problem := find_bad_name(infos):
        raise FileError(f"{path}: cannot be written: {problem}", code="invalid-tensor-name")
    with AtomicFile(path, check) as file:
        writer = Writer(file, infos, alignment)
        writer.pad(file.write(encode_head(metadata, infos, alignment)))
        yield writer
        if writer.remaining:
            raise ValueError(
                f"{len(writer.remaining)} tensors were not written, {writer.remaining[0].name} is next"
            )


class Writer:
    """Writes the data of the tensors in the order of their infos."""

    def __init__(self, file: AtomicFile, infos: list[TensorInfo], alignment: int) -> None:
        self.remaining = infos
        self._file = file
        self._alignment = alignment

    def write(self, name: str, data: np.ndarray | Iterable[np.ndarray | bytes]) -> None:
        """Write the data of the next tensor: an array with its bytes, or chunks of them."""
        info = self.remaining.pop(0)
        if name != info.name:
            raise ValueError(f"{name} is written where {info.name} is next")
        chunks = (data,) if isinstance(data, np.ndarray) else data
        written = sum(self._file.write(chunk) for chunk in chunks)
        if written != info.nbytes:
            raise ValueError(f"{name} has {info.nbytes} bytes, and {written} were written")
        self.pad(written)

    def overwrite(self, at: int, data: bytes) -> None:
        """Overwrite bytes of the head, for values that become known later but whose size is fixed."""
        self._file.overwrite(at, data)

    def pad(self, written: int) -> None:
        """Write zeros up to the alignment, after `written` bytes."""
        self._file.write(bytes(-written % self._alignment))


def find_bad_name(infos: Sequence[TensorInfo]) -> str | None:
    """Return what is wrong with a tensor's name, so that llama.cpp could not open the file, or None."""
    seen = set[str]()
    for info in infos:
        if len(encode_string(info.name)) - LENGTH.size > MAX_NAME_BYTES:
            return f"the tensor's name {quote(info.name)} has more than {MAX_NAME_BYTES} bytes"
        if info.name in seen:
            return f"two tensors are called {quote(info.name)}"
        seen.add(info.name)
    return None


def encode_head(metadata: Mapping[str, Value], infos: Sequence[TensorInfo], alignment: int) -> bytes:
    """Return the bytes before the tensors' data."""
    head = bytearray(MAGIC + U32.pack(VERSION) + LENGTH.pack(len(infos)) + LENGTH.pack(len(metadata)))
    for key, value in metadata.items():
        head += encode_string(key) + U32.pack(value.kind) + value.raw
    offset = 0
    for info in infos:
        axes = b"".join(LENGTH.pack(axis) for axis in reversed(info.shape))
        head += (
            encode_string(info.name)
            + U32.pack(len(info.shape))
            + axes
            + U32.pack(info.type.number)
            + LENGTH.pack(offset)
        )
        offset += -(-info.nbytes // alignment) * alignment
    return bytes(head)
