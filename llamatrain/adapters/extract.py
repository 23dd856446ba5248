"""Makes an adapter of the difference between two models: of each weight, the best approximation of low rank.

The singular vectors with the largest singular values are found by subspace iteration from a random start
(Halko, Martinsson and Tropp 2011). It reads the difference a few times, and needs no decomposition of a large
matrix. One matrix is in memory at a time, in float32.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llamatrain.adapters.adapter import LoraPair, is_transposed
from llamatrain.errors import FileError
from llamatrain.gguf.reader import FileTensor
from llamatrain.gguf.rewrite import decode_panels, is_same
from llamatrain.model.architecture import Architecture

EXTRA = 16  # vectors of the subspace beyond twice the rank; the more, the fewer iterations
TOLERANCE = 1e-4  # an iteration that adds less than this share of what is held is the last
MAX_ITERATIONS = 50


@dataclass(frozen=True, slots=True)
class ExtractedPair:
    """The pair of a weight, and how much of the difference it holds, in sums of squares."""

    pair: LoraPair
    held: float
    total: float

    @property
    def share(self) -> float:
        """The share of the difference's squared norm that the pair holds."""
        return self.held / self.total


def differs(base: FileTensor, tuned: FileTensor, threads: int) -> bool:
    """Return True if two tensors have different values."""
    if base.type is tuned.type:
        return not is_same(base, tuned)
    panels = zip(decode_panels(base, threads), decode_panels(tuned, threads), strict=True)
    return any(not np.array_equal(one, other, equal_nan=True) for one, other in panels)


def extract_pair(
    base: FileTensor,
    tuned: FileTensor,
    rank: int,
    architecture: Architecture[Any, Any],
    path: Path,
    threads: int,
) -> ExtractedPair:
    """Return the pair of a weight; `path` is that of the tuned model, for errors.

    A stack of experts has a pair for each expert, and all have the same rank.
    """
    name = base.name
    rank = min(rank, *(base.shape[-2:] if len(base.shape) > 1 else (1,)))
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    lefts, rights, held, total = [], [], 0.0, 0.0
    for difference in differences(base, tuned, threads):
        size = float(np.abs(difference).max())
        if not np.isfinite(size):
            raise FileError(
                f"{path}: {name} or its weights in the base are not finite; the file is damaged",
                code="not-finite",
            )
        difference /= np.float32(size or 1)  # so that no square is too large or too small
        left, values, right = truncated_svd(difference, rank, generator)
        roots = np.sqrt(values * np.float32(size))
        lefts.append(left * roots)
        rights.append(roots[:, None] * right)
        held += size**2 * float(np.sum(np.square(values, dtype=np.float64)))
        total += size**2 * float(np.sum(np.square(difference, dtype=np.float64)))
    left, right = (np.stack(parts) if len(base.shape) > 2 else parts[0] for parts in (lefts, rights))
    pair = LoraPair(left, right.T, 1.0) if is_transposed(architecture, name) else LoraPair(right, left, 1.0)
    return ExtractedPair(pair, held, total)


def differences(base: FileTensor, tuned: FileTensor, threads: int) -> Iterator[np.ndarray]:
    """Yield the difference of two tensors in float32, matrix by matrix; that of a vector has one row."""
    rows, columns = base.shape[-2] if len(base.shape) > 1 else 1, base.shape[-1]
    matrix, filled = np.empty((rows, columns), np.float32), 0
    for one, other in zip(decode_panels(base, threads), decode_panels(tuned, threads), strict=True):
        with np.errstate(over="ignore", invalid="ignore"):  # the caller checks if it is finite
            change = (other - one).reshape(-1, columns)
        while len(change):
            part = change[: rows - filled]
            matrix[filled : filled + len(part)] = part
            filled, change = filled + len(part), change[len(part) :]
            if filled == rows:
                yield matrix
                filled = 0


def truncated_svd(
    matrix: np.ndarray, rank: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the left vectors (rows, rank), the values, and the right vectors (rank, columns), in float32."""
    size = min(2 * rank + EXTRA, *matrix.shape)
    basis = np.linalg.qr(matrix @ generator.standard_normal((matrix.shape[1], size), np.float32)).Q
    held = 0.0
    for _ in range(MAX_ITERATIONS):
        left, values, right = np.linalg.svd(basis.T @ matrix, full_matrices=False)
        before, held = held, float(np.sum(np.square(values[:rank], dtype=np.float64)))
        if held - before <= TOLERANCE * held:
            break
        basis = np.linalg.qr(matrix @ right.T).Q
    return (basis @ left)[:, :rank], values[:rank], right[:rank]
