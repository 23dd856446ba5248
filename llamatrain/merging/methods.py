"""The formulas of merges, for one tensor, of which each model has another version.

Tensors arrive in panels, which are read several times where a formula needs a number of the whole tensor. All
sums are in float64, in a fixed order.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import acos, sin, sqrt

import numpy as np

from llamatrain.merging.recipe import TASK_METHODS, Recipe, Source, TaskMethod

Panels = Callable[[], Iterator[np.ndarray]]  # reads a tensor from its beginning, in float64
Sparsifier = Callable[[np.ndarray], np.ndarray]  # is called with the panels of a difference, in their order
COLLINEAR = 0.9995  # the cosine from which on an arc is taken for a line, as in mergekit


def merge(recipe: Recipe, name: str, versions: Sequence[Panels], base: Panels | None) -> Iterator[np.ndarray]:
    """Yield the panels of a merged tensor; the versions are those of the recipe's sources."""
    if base and not versions:
        return base()
    if base:
        return add_differences(recipe, name, versions, base)
    weights = [source.weight for source in recipe.sources]
    if recipe.method == "slerp" and len(versions) == 2:
        first, second = versions
        return average(versions, arc_weights(first, second, weights[1]), 1.0)
    return average(versions, weights, sum(weights) if recipe.normalize else 1.0)


# ---- averages --------------------------------------------------------------


def average(versions: Sequence[Panels], weights: Sequence[float], divisor: float) -> Iterator[np.ndarray]:
    """Yield the sum of all versions times their weights, divided by `divisor`."""
    for panels in zip(*(version() for version in versions), strict=True):
        yield weighted_sum(weights, panels) / divisor


def weighted_sum(weights: Sequence[float], panels: Sequence[np.ndarray]) -> np.ndarray:
    """Return the sum of panels times their weights."""
    total = weights[0] * panels[0]
    for weight, panel in zip(weights[1:], panels[1:], strict=True):
        total += weight * panel
    return total


def arc_weights(first: Panels, second: Panels, share: float) -> tuple[float, float]:
    """Return the weights of two tensors for the point at a share of the arc between them.

    The tensors are taken as vectors. If they are (nearly) parallel, or one is zero, the point is on the line
    between them.
    """
    dot = first_square = second_square = 0.0
    for a, b in zip(first(), second(), strict=True):
        dot += float(np.sum(a * b))  # np.dot adds in an order that depends on the threads of BLAS
        first_square += float(np.sum(a * a))
        second_square += float(np.sum(b * b))
    lengths = sqrt(first_square) * sqrt(second_square)
    if not lengths or not abs(dot / lengths) <= COLLINEAR:
        return 1 - share, share
    angle = acos(dot / lengths)
    return sin((1 - share) * angle) / sin(angle), sin(share * angle) / sin(angle)


# ---- differences from a base -----------------------------------------------


def add_differences(
    recipe: Recipe, name: str, versions: Sequence[Panels], base: Panels
) -> Iterator[np.ndarray]:
    """Yield the base with the differences of all versions from it."""
    method = TASK_METHODS[recipe.method]
    sparsifiers = [
        make_sparsifier(method, source, recipe.seed, name, version, base)
        for source, version in zip(recipe.sources, versions, strict=True)
    ]
    weights = [source.weight for source in recipe.sources]
    for origin, *panels in zip(base(), *(version() for version in versions), strict=True):
        differences = [sparsify(panel - origin) for sparsify, panel in zip(sparsifiers, panels, strict=True)]
        yield origin + recipe.scale * mix(differences, weights, method.elects_signs, recipe.normalize)


def mix(
    differences: Sequence[np.ndarray], weights: Sequence[float], elects_signs: bool, normalize: bool
) -> np.ndarray:
    """Return the weighted sum of differences, or with `normalize` their mean.

    If signs are elected, only values with the sign of the sum of all take part, and a mean is that of these.
    """
    total = weighted_sum(weights, differences)
    if not elects_signs:
        return total / (sum(weights) or 1.0) if normalize else total
    sign = np.where(total >= 0, 1.0, -1.0)
    total, weight_sum = np.zeros_like(total), np.zeros_like(total)
    for weight, difference in zip(weights, differences, strict=True):
        agrees = np.sign(weight * difference) == sign
        total += np.where(agrees, weight * difference, 0.0)
        weight_sum += np.where(agrees, weight, 0.0)
    return total / np.where(weight_sum, weight_sum, 1.0) if normalize else total


def make_sparsifier(
    method: TaskMethod, source: Source, seed: int, name: str, version: Panels, base: Panels
) -> Sparsifier:
    """Return a function that zeros the values of a difference which its model does not add."""
    if method.keeps == "all" or source.density == 1:
        return lambda difference: difference
    if method.keeps == "random":
        return drop_at_random(source, seed, name)

    def magnitudes() -> Iterator[np.ndarray]:
        """Yield the sizes of all differences."""
        return (
            np.abs(panel - origin).astype(np.float32) for panel, origin in zip(version(), base(), strict=True)
        )

    threshold = smallest_of_largest(magnitudes, source.density)
    return lambda difference: np.where(np.abs(difference).astype(np.float32) >= threshold, difference, 0.0)


def drop_at_random(source: Source, seed: int, name: str) -> Sparsifier:
    """Return a function that keeps each value with a probability, divided by that probability.

    The random numbers depend on the seed, the model's place and the tensor's name alone.
    """
    generator = np.random.default_rng([seed, source.number, zlib.crc32(name.encode())])

    def drop(difference: np.ndarray) -> np.ndarray:
        kept = generator.random(difference.shape) < source.density
        return np.where(kept, difference / source.density, 0.0)

    return drop


def smallest_of_largest(magnitudes: Callable[[], Iterable[np.ndarray]], share: float) -> np.float32:
    """Return the smallest of the largest numbers, which are a share of all, but at least one.

    The numbers are in float32 and not negative, so their bits have the same order. The upper half of the bits
    is found by counting, and in a second pass the lower half, among the numbers with this upper half.
    """
    found = rank = 0
    for shift in (16, 0):
        counts = np.zeros(1 << 16, np.int64)
        for panel in magnitudes():
            bits = panel.reshape(-1).view(np.uint32)
            if shift == 0:
                bits = bits[bits >> 16 == found >> 16]
            counts += np.bincount(bits >> shift & 0xFFFF, minlength=1 << 16)
        rank = rank or max(1, int(share * counts.sum()))
        from_top = np.cumsum(counts[::-1])
        place = int(np.searchsorted(from_top, rank))
        rank -= int(from_top[place - 1]) if place else 0
        found |= (len(counts) - 1 - place) << shift
    return np.uint32(found).view(np.float32)
