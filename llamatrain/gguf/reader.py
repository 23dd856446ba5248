"""Opens GGUF files: tensors are mapped and decoded on demand, metadata is copied.

A file is untrusted: lengths, counts, offsets and nesting are checked against its size before they are used. A
file is unmapped when its `Gguf` and all views of its tensors are gone.
"""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from llamatrain.errors import FileError
from llamatrain.extensions import load_extensions
from llamatrain.gguf.constants import ALIGNMENT, MAGIC
from llamatrain.gguf.opened_file import FileTensor, Gguf, Metadata
from llamatrain.gguf.parser import Cursor, quote
from llamatrain.gguf.types import TYPES, TensorInfo
from llamatrain.gguf.values import U32, Kind, Value
from llamatrain.gguf.wrong_file import HEAD_BYTES, describe_file, describe_folder
from llamatrain.io.mapped_file import MappedFile, map_file, verify_unchanged
from llamatrain.sources.names import locate_model

PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
ByteRange = tuple[Kind, int, int]  # the kind, start and end of a value
__all__ = ["PART_NAME", "FileTensor", "Gguf", "Metadata", "open_gguf"]


OUTDATED = (b"tjgg", b"lmgg", b"fmgg")  # magic bytes of models from before GGUF


def other_formats() -> dict[bytes, Callable[[MappedFile], Gguf]]:
    """Return readers of further file formats, by their magic bytes."""
    return {magic: read for table in load_extensions("file_formats") for magic, read in table.items()}


def open_gguf(path: str | Path) -> Gguf:
    """Open a GGUF file, a split model (by any of its parts), or a checkpoint from before GGUF.

    The path may be a remote name, whose file is found or downloaded.
    """
    path = locate_model(path)
    if path.is_dir():
        raise FileError(describe_folder(path), code="not-gguf")
    file = map_file(path)
    if read_other := other_formats().get(file.read_bytes(0, len(MAGIC))):
        return read_other(file)
    first = read_part(path)
    count = first.get_value("split.count", int, 1)
    return first if count <= 1 else join_parts(path, first, count)


# ---- one file --------------------------------------------------------------


def read_part(path: Path) -> Gguf:
    """Read one file, without other parts of a split model."""
    file = map_file(path)
    with verify_unchanged([file]):
        cursor = Cursor(file)
        tensors, values = read_header(cursor)
        ranges = read_metadata(cursor, values)
        alignment = read_alignment(cursor, ranges)
        infos = read_tensor_infos(cursor, tensors, alignment)
        head = memoryview(cursor.data).toreadonly()
        metadata = {key: Value(kind, head[start:end]) for key, (kind, start, end) in ranges.items()}
        return Gguf(path, Metadata(metadata), place_tensors(cursor, infos, alignment))


def read_header(cursor: Cursor) -> tuple[int, int]:
    """Read the header and return the numbers of tensors and of metadata values."""
    magic = cursor.first_bytes(len(MAGIC))
    if magic in OUTDATED:
        raise cursor.error(
            f"begins with {magic!r}: a model from before GGUF; convert it with llama.cpp's scripts of 2023",
            code="legacy-model",
        )
    if magic != MAGIC:
        if message := describe_file(
            cursor.path, bytes(cursor.file.read_bytes(0, min(HEAD_BYTES, cursor.size)))
        ):
            raise FileError(message, code="not-gguf")
        raise cursor.error(f"begins with {magic!r}; a GGUF file begins with {MAGIC!r}", code="not-gguf")
    version = cursor.read_u32()
    if version and version & 0xFFFF == 0:
        raise cursor.error(
            "the file is big-endian (for s390x or similar); only little-endian files are supported",
            code="big-endian",
        )
    if version not in (2, 3):
        raise cursor.error(
            f"GGUF version {version} is not supported; versions 2 and 3 are: convert the model again",
            code="unsupported-version",
        )
    tensors = cursor.read_u64()
    values = cursor.read_count(13)  # the length of a key, a kind, a byte
    if tensors * 32 > cursor.size:  # the length of a name, the axes, one of them, type and offset
        raise cursor.error(
            f"a file of {cursor.size} bytes is too small for {tensors} tensors", code="truncated-file"
        )
    return tensors, values


def read_metadata(cursor: Cursor, count: int) -> dict[str, ByteRange]:
    """Return the kind and the byte range of each value, by key."""
    ranges: dict[str, ByteRange] = {}
    for i in range(count):
        cursor.context = f"value {i + 1} of {count}"
        key = cursor.read_name()
        cursor.context += f", {quote(key)}"
        if key in ranges:
            raise cursor.error("duplicate key")
        kind, start = cursor.read_kind(), cursor.offset
        cursor.skip(kind)
        ranges[key] = kind, start, cursor.offset
    return ranges


def read_alignment(cursor: Cursor, metadata: dict[str, ByteRange]) -> int:
    """Return the alignment of tensor data."""
    if "general.alignment" not in metadata:
        return ALIGNMENT
    kind, start, _ = metadata["general.alignment"]
    alignment: int = U32.unpack_from(cursor.data, start)[0] if kind is Kind.UINT32 else 0
    if alignment.bit_count() != 1:
        raise cursor.error(
            f"general.alignment must be a power of two of type UINT32 (got {kind.name} {alignment or ''})"
        )
    return alignment


def read_tensor_infos(cursor: Cursor, count: int, alignment: int) -> dict[str, tuple[TensorInfo, int]]:
    """Return each tensor and the offset of its data from where the data begins, by name."""
    infos: dict[str, tuple[TensorInfo, int]] = {}
    for i in range(count):
        cursor.context = f"tensor {i + 1} of {count}"
        name = cursor.read_name()
        cursor.context += f", {quote(name)}"
        if name in infos:
            raise cursor.error("duplicate name")
        info = read_tensor_info(cursor, name)
        offset = cursor.read_u64()
        if offset % alignment:
            raise cursor.error(f"the data's offset {offset} is not a multiple of the alignment {alignment}")
        infos[name] = info, offset
    return infos


def read_tensor_info(cursor: Cursor, name: str) -> TensorInfo:
    """Read the shape and type of a tensor."""
    axes = cursor.read_u32()
    if not 1 <= axes <= 4:
        raise cursor.error(f"there must be 1 to 4 dimensions (got {axes})")
    shape = tuple(cursor.read_u64() for _ in range(axes))[::-1]
    if 0 in shape:
        raise cursor.error(f"a dimension is 0 in {list(shape)}")
    number = cursor.read_u32()
    if number not in TYPES:
        raise cursor.error(
            f"unknown tensor type {number}; known are {', '.join(kind.name for kind in TYPES.values())}",
            code="unsupported-tensor-type",
        )
    kind = TYPES[number]
    if shape[-1] % kind.block_size:
        raise cursor.error(f"rows of {shape[-1]} are not whole {kind.name} blocks of {kind.block_size}")
    return TensorInfo(name, kind, shape)


def place_tensors(
    cursor: Cursor, infos: dict[str, tuple[TensorInfo, int]], alignment: int
) -> dict[str, FileTensor]:
    """Return the tensors with their offsets in the file, after checking that no two overlap."""
    start = -(-cursor.offset // alignment) * alignment
    file = np.frombuffer(cursor.file, np.uint8)
    tensors = {
        name: FileTensor(name, info.type, info.shape, start + at, file) for name, (info, at) in infos.items()
    }
    end, last = start, ""
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        cursor.context, cursor.offset = f"tensor {quote(tensor.name)}", tensor.offset
        if tensor.offset < end:
            raise cursor.error(f"its data overlaps that of {quote(last)}")
        end, last = tensor.offset + tensor.nbytes, tensor.name
        if end > len(file):
            raise cursor.error(
                f"its data ends at byte {end}, but the file at {len(file)}", code="truncated-file"
            )
    return tensors


# ---- split models ----------------------------------------------------------


def join_parts(path: Path, opened_part: Gguf, count: int) -> Gguf:
    """Join all parts of a split model, with the first part's metadata less the keys of the split."""
    match = PART_NAME.fullmatch(path.name)
    if not match or int(match[3]) != count:
        raise FileError(
            f"{path}: a part of a split model must be named ...-0000N-of-{count:05}.gguf, so that the others are found",
            code="invalid-split",
        )
    tensors: dict[str, FileTensor] = {}
    metadata: dict[str, Value] = {}
    for i in range(count):
        part_path = path.with_name(f"{match[1]}-{i + 1:05}-of-{count:05}.gguf")
        if not part_path.exists():
            raise FileError(
                f"{path}: part {i + 1} of {count} of the split model is missing: {part_path}",
                code="missing-part",
            )
        part = opened_part if part_path == path else read_part(part_path)
        if (part.get_value("split.no", int), part.get_value("split.count", int)) != (i, count):
            raise FileError(
                f"{part_path}: split.no and split.count must identify part {i + 1} of {count}",
                code="invalid-split",
            )
        if duplicates := tensors.keys() & part.tensors.keys():
            raise FileError(
                f"{part_path}: another part also has the tensor {quote(min(duplicates))}",
                code="invalid-split",
            )
        tensors |= part.tensors
        metadata = metadata or part.metadata.raw_values
    first = Gguf(path, Metadata(metadata), tensors)
    if (expected := first.get_value("split.tensors.count", int, len(tensors))) != len(tensors):
        raise FileError(
            f"{path}: the parts have {len(tensors)} tensors in total, but {expected} are expected",
            code="invalid-split",
        )
    joined_metadata = {key: value for key, value in metadata.items() if not key.startswith("split.")}
    return Gguf(path, Metadata(joined_metadata), tensors)
