"""LoRA adapters: pairs of low-rank factors whose product is added to weights of a model.

A weight W (out, in) becomes W + scale B A, where A is a pair's `a` (r, in) and B its `b` (out, r). The pair
of the embeddings is transposed, as in llama.cpp's files: `a` (vocab, r), of which a token's row is taken, and
`b` (embd, r), so that the matrix becomes W + scale a bᵀ. A norm's gains (n) are a matrix with one row: `a`
(r, n), `b` (1, r); llama.cpp's old finetune made such pairs for all norms, and today's llama.cpp applies
none. Experts (E, out, in) have a pair for each expert, in stacks: `a` (E, r, in), `b` (E, out, r).
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from llamatrain.adapters.options import LARGEST
from llamatrain.errors import FileError
from llamatrain.gguf import quants
from llamatrain.gguf.parser import quote
from llamatrain.gguf.types import GgmlType
from llamatrain.model.architecture import Architecture
from llamatrain.model.architectures import DEFAULT, find_architecture
from llamatrain.model.hyperparameters import Hyperparameters

Half = Literal["a", "b"]
Halves = dict[str, dict[Half, np.ndarray]]  # by weight


@dataclass(frozen=True, slots=True, eq=False)
class LoraPair:
    """The factors of one weight, and their scale."""

    a: np.ndarray
    b: np.ndarray
    scale: float

    @property
    def rank(self) -> int:
        """The rank."""
        return self.b.shape[-1]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Adapter:
    """An adapter in memory."""

    source: Path  # for messages
    alpha: float  # the default scale of a pair of rank r is alpha / r; 0: 1
    pairs: dict[str, LoraPair]  # by the weight's name, in float32
    name: str = ""
    merged_type: str = ""  # the type of the merged model that it was trained for, such as "q4_0"; "": any
    architecture: Architecture[Any, Any] = field(default_factory=lambda: find_architecture(DEFAULT))

    def scale_by(self, factor: float) -> Self:
        """Return the adapter with all scales multiplied."""
        return replace(
            self, pairs={name: replace(pair, scale=factor * pair.scale) for name, pair in self.pairs.items()}
        )

    def without(self, names: Collection[str]) -> Self:
        """Return the adapter without the pairs of these weights."""
        return replace(self, pairs={name: pair for name, pair in self.pairs.items() if name not in names})

    def delta(self, name: str, lo: int = 0, hi: int | None = None) -> np.ndarray:
        """Return rows `lo` to `hi` of what is added to a weight, as a new float32 matrix.

        The rows of experts are those of the first expert, then those of the second, and so on.
        """
        left, right = self.factors(name)
        left, right = left.reshape(-1, *left.shape[-2:]), right.reshape(-1, *right.shape[-2:])
        count, (lo, hi, _) = left.shape[1], slice(lo, hi).indices(left.shape[0] * left.shape[1])
        delta = np.empty((max(0, hi - lo), right.shape[2]), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # the caller checks if it is finite
            for expert in range(lo // count, -(-hi // count)):
                first, last = max(lo, expert * count), min(hi, (expert + 1) * count)
                rows = left[expert, first - expert * count : last - expert * count]
                np.matmul(
                    np.float32(self.pairs[name].scale) * rows,
                    right[expert],
                    out=delta[first - lo : last - lo],
                )
        return delta

    def factors(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the matrices (out, r) and (r, in) whose product is added, or stacks of them for experts."""
        pair = self.pairs[name]
        return (pair.a, pair.b.T) if is_transposed(self.architecture, name) else (pair.b, pair.a)

    @property
    def norm_names(self) -> list[str]:
        """The names of norms that have a pair."""
        return select_norms(self.architecture, self.pairs)


def is_transposed(architecture: Architecture[Any, Any], name: str) -> bool:
    """Return True if a weight's pair is transposed, as that of the embeddings."""
    kind = architecture.weight_kind(name)
    return kind is not None and kind.has_transposed_lora


def has_experts(architecture: Architecture[Any, Any], name: str) -> bool:
    """Return True if a weight is a stack of experts, whose factors are stacks too."""
    kind = architecture.weight_kind(name)
    return kind is not None and kind.role == "experts"


def select_norms(architecture: Architecture[Any, Any], names: Iterable[str]) -> list[str]:
    """Return the names that are norms."""
    kinds = {name: architecture.weight_kind(name) for name in names}
    return [name for name, kind in kinds.items() if kind and kind.role == "norm"]


def default_scale(alpha: float, rank: int) -> float:
    """Return the scale alpha / rank; 1 if alpha is 0."""
    return alpha / rank if alpha else 1.0


# ---- for those that read files ---------------------------------------------


def decode_factor(
    source: Path, name: str, raw: np.ndarray, kind: GgmlType, stacked: bool = False
) -> np.ndarray:
    """Return a factor as a float32 matrix, copied from the file; the last axis of `raw` has a row's bytes.

    A factor of experts is a stack of matrices.
    """
    if raw.ndim != 3 if stacked else raw.ndim > 2:
        wanted = "three dimensions, as a factor of experts" if stacked else "two dimensions"
        raise FileError(f"{source}: {quote(name)} must have {wanted} (got {raw.ndim})", code="invalid-factor")
    rows = np.atleast_2d(raw)
    return np.array(rows.view("<f4"), np.float32) if kind.name == "F32" else quants.decode(rows, kind)


def parse_factor_name(
    halves: Halves, source: Path, name: str, suffixes: Mapping[str, Half]
) -> tuple[str, Half]:
    """Return the weight and the factor that a tensor's name means; raise if that factor was read before."""
    for suffix, half in suffixes.items():
        if name.endswith(suffix) and (weight := name.removesuffix(suffix)):
            if half in halves.setdefault(weight, {}):
                raise FileError(f"{source}: {quote(name)} occurs twice", code="duplicate-tensor")
            return weight, half
    raise FileError(
        f"{source}: {quote(name)} is not a factor of an adapter; names must end in {' or '.join(suffixes)}",
        code="unknown-tensor",
    )


def check_halves(source: Path, pairs: Halves, architecture: Architecture[Any, Any]) -> None:
    """Raise if a pair lacks a factor, or its factors differ in rank."""
    if not pairs:
        raise FileError(f"{source}: the file contains no pair of factors", code="no-pairs")
    for name, halves in pairs.items():
        if len(halves) < 2:
            present, missing = ("a", "b") if "a" in halves else ("b", "a")
            raise FileError(
                f"{source}: {quote(name)} has factor {present}, but factor {missing} is missing",
                code="missing-factor",
            )
        a, b = halves["a"], halves["b"]
        if a.shape[:-2] != b.shape[:-2]:
            raise FileError(
                f"{source}: {quote(name)}: factors a {list(a.shape)} and b {list(b.shape)} differ in their "
                "number of experts",
                code="rank-mismatch",
            )
        if a.shape[-1 if is_transposed(architecture, name) else -2] != b.shape[-1]:
            raise FileError(
                f"{source}: {quote(name)}: factors a {list(a.shape)} and b {list(b.shape)} differ in rank",
                code="rank-mismatch",
            )


# ---- for those that use adapters -------------------------------------------


def check_fits(adapter: Adapter, h: Hyperparameters, base: object) -> None:
    """Raise if an adapter is not for this base (architecture, names, shapes), or has invalid numbers."""
    adapter_architecture, base_architecture = adapter.architecture, h.architecture
    if adapter_architecture is not base_architecture:
        raise FileError(
            f"{adapter.source}: the adapter is for the architecture "
            f"{adapter_architecture.name!r}, but {base} is a {base_architecture.name}",
            code="wrong-base",
        )
    shapes = h.shapes
    for name in adapter.pairs:
        kind = base_architecture.weight_kind(name)
        if h.tied and kind and kind.role in ("embedding", "output"):
            raise FileError(
                f"{adapter.source}: has a pair for {name}, but the embeddings of {base} are tied: "
                "one matrix is input and output, and an adapter cannot change only one of them",
                code="tied-embeddings",
            )
        if name not in shapes:
            raise FileError(
                f"{adapter.source}: has a pair for {quote(name)}, which {base} does not have; the "
                "adapter is for another base",
                code="wrong-base",
            )
        if kind and not kind.has_lora:
            which = "biases" if kind.role == "bias" else "such weights"
            raise FileError(
                f"{adapter.source}: has a pair for {name}, but {which} cannot have an adapter",
                code="unsupported-adapter",
            )
        left, right = adapter.factors(name)
        actual, needed = (*left.shape[:-1], right.shape[-1]), shapes[name]
        if actual != ((1, *needed) if len(needed) == 1 else needed):
            raise FileError(
                f"{adapter.source}: the pair of {name} is for a weight of {list(actual)}, but {base} "
                f"has {list(needed)}; the adapter is for another base",
                code="wrong-base",
            )
        check_numbers(adapter, name)


def checked_factors(
    adapter: Adapter, h: Hyperparameters, base: object
) -> dict[str, tuple[np.ndarray, np.ndarray, float]]:
    """Check the adapter, and return a, b and scale by weight, as graphs take them."""
    check_fits(adapter, h, base)
    return {name: (pair.a, pair.b, pair.scale) for name, pair in adapter.pairs.items()}


def check_numbers(adapter: Adapter, name: str) -> None:
    """Raise if the scale is out of range, or a factor is not finite."""
    pair = adapter.pairs[name]
    if not (math.isfinite(pair.scale) and abs(pair.scale) <= LARGEST):
        raise FileError(
            f"{adapter.source}: the scale of {name} must be at most {LARGEST:g} (got "
            f"{pair.scale:g}, alpha {adapter.alpha:g}); the file is damaged, or the adapter is "
            "scaled by too much",
            code="invalid-scale",
        )
    for half, factor in (("a", pair.a), ("b", pair.b)):
        if not (math.isfinite(factor.max()) and math.isfinite(factor.min())):
            raise FileError(f"{adapter.source}: factor {half} of {name} is not finite", code="not-finite")
