"""Importance matrices in llama.cpp's format: how large the inputs of a weight's columns are, as sums of squares over tokens.

A file has two tensors for each weight: NAME.in_sum2 (matrices, columns) and NAME.counts (matrices, 1); only stacks of
experts have several matrices. Files of an older format, imatrix.dat, have means instead, and can be read as well.
"""

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llamatrain.config.read_limited import read_limited
from llamatrain.errors import FileError
from llamatrain.gguf.constants import MAGIC
from llamatrain.gguf.opened_file import FileTensor
from llamatrain.gguf.parser import quote
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.types import TensorInfo, type_by_name
from llamatrain.gguf.values import string, strings, u32
from llamatrain.gguf.writer import create_gguf
from llamatrain.io.mapped_file import verify_unchanged

SUMS, COUNTS = ".in_sum2", ".counts"

NEEDED = "an importance matrix of llama.cpp"
MAX_OLD_BYTES = 1 << 30  # of a file in the older format
Importances = dict[str, np.ndarray]  # mean squares in float32 (matrices, columns), by weight


class InputSums(NamedTuple):
    """The inputs of a weight: sums of squares (matrices, columns), and the number of tokens of each matrix."""

    squares: np.ndarray
    counts: np.ndarray


def write_imatrix(
    path: Path, sums: Mapping[str, InputSums], datasets: Iterable[str], chunks: int, chunk_tokens: int
) -> None:
    """Write a file atomically. A chunk is a row of tokens; only its number and length are recorded."""
    metadata = {
        "general.type": string("imatrix"),
        "imatrix.datasets": strings(datasets),
        "imatrix.chunk_count": u32(chunks),
        "imatrix.chunk_size": u32(chunk_tokens),
    }
    arrays = {}
    for name in sorted(sums):
        arrays[name + SUMS], arrays[name + COUNTS] = sums[name].squares, sums[name].counts[:, None]
    infos = [TensorInfo(name, type_by_name("F32"), array.shape) for name, array in arrays.items()]
    with create_gguf(path, metadata, infos) as out:
        for name, array in arrays.items():
            out.write(name, np.ascontiguousarray(array, "<f4").view(np.uint8))


def read_imatrix(path: Path) -> Importances:
    """Return the mean squares in a file; an expert that no token chose has ones, as in llama.cpp."""
    found = read_old_imatrix(path) if is_old(path) else read_new_imatrix(path)
    for name, means in found.items():
        if not (np.isfinite(means).all() and (means >= 0).all()):
            raise FileError(
                f"{path}: {quote(name)} has numbers that are no sums of squares", code="not-finite"
            )
    if not found:
        raise FileError(f"{path}: {NEEDED} is needed; the file has no weights", code="not-an-imatrix")
    return found


def is_old(path: Path) -> bool:
    """Return True if a file is not a GGUF file."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) != MAGIC
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}", code="unreadable-file") from None


def read_new_imatrix(path: Path) -> Importances:
    """Return the mean squares in a GGUF file."""
    gguf = open_gguf(path)
    if gguf.kind != "importance matrix":
        raise FileError(f"{path}: {NEEDED} is needed (got a file of kind {gguf.kind})", code="not-an-imatrix")
    found: Importances = {}
    with verify_unchanged(gguf.mapped_files):
        for name, tensor in gguf.tensors.items():
            weight, _, _ = name.rpartition(SUMS)
            if not name.endswith(SUMS):
                continue
            counts = gguf.tensors.get(weight + COUNTS)
            if counts is None:
                raise FileError(f"{path}: {quote(weight + COUNTS)} is missing", code="missing-tensor")
            found[weight] = mean_squares(path, tensor, counts)
    return found


def mean_squares(path: Path, tensor: FileTensor, counts: FileTensor) -> np.ndarray:
    """Return sums divided by counts."""
    matrices = tensor.shape[0] if len(tensor.shape) == 2 else 1
    if (
        {tensor.type.name, counts.type.name} != {"F32"}
        or counts.elements != matrices
        or len(tensor.shape) > 2
    ):
        raise FileError(
            f"{path}: {quote(tensor.name)} and its counts must be F32, with a count for each matrix (got "
            f"{tensor.type.name} {list(tensor.shape)} and {counts.type.name} {list(counts.shape)})",
            code="wrong-tensor-shape",
        )
    squares, tokens = (np.array(each.raw.view("<f4"), np.float32) for each in (tensor, counts))
    tokens = tokens.reshape(matrices, 1)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(tokens > 0, squares.reshape(matrices, -1) / np.where(tokens > 0, tokens, 1), 1.0)


def read_old_imatrix(path: Path) -> Importances:
    """Return the mean squares in a file of the older format: names, numbers of chunks, and means times that number."""
    raw, at = read_limited(path, MAX_OLD_BYTES, NEEDED), 0

    def take(size: int) -> bytes:
        nonlocal at
        if not 0 <= size <= len(raw) - at:
            raise FileError(f"{path}: {NEEDED} is needed; the file ends too early", code="not-an-imatrix")
        at += size
        return raw[at - size : at]

    def take_count() -> int:
        return int(struct.unpack("<i", take(4))[0])

    found: Importances = {}
    for _ in range(take_count()):
        name = take(take_count()).decode("utf-8", "replace")
        chunks = take_count()
        means = np.frombuffer(take(4 * take_count()), "<f4").astype(np.float32)
        with np.errstate(invalid="ignore"):
            found[name] = (means / max(1, chunks)).reshape(1, -1)
    return found


def fit_importances(path: Path, found: Importances, tensors: Iterable[TensorInfo]) -> Importances:
    """Return the importances of tensors that a file has, each with a row for each matrix; raise if it fits none."""
    fitting: Importances = {}
    for tensor in tensors:
        means = found.get(tensor.name)
        if means is None:
            continue
        shape = tensor.shape[0] if len(tensor.shape) > 2 else 1, tensor.shape[-1]
        if means.size != shape[0] * shape[1]:
            raise FileError(
                f"{path}: {quote(tensor.name)} has {means.size:,} importances, but that weight of the model needs "
                f"{shape[0] * shape[1]:,}; measure those of this model with llamatrain imatrix",
                code="wrong-tensor-shape",
            )
        fitting[tensor.name] = means.reshape(shape)
    if not fitting:
        raise FileError(
            f"{path}: none of its {len(found):,} weights, such as {quote(next(iter(found)))}, is one of the model",
            code="not-for-this-model",
        )
    return fitting


def importance_of_rows(importance: np.ndarray, tensor: TensorInfo, lo: int, hi: int) -> np.ndarray:
    """Return the importances of some rows of a weight, or one row for all of them."""
    if len(importance) == 1:
        return importance[0]
    return np.asarray(importance[np.arange(lo, hi) // tensor.shape[-2]])
