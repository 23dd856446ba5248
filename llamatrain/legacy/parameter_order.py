"""The order in which the vectors of llama.cpp's old optimizers hold the parameters.

It is the order in which its graph visits them: depth first from the loss, the sources of an op from left to
right or from right to left, whichever took less memory. The file states neither that nor if attention was one
op (flash) or products, so it is inferred from the content of the vectors.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod

import numpy as np

Order = tuple[str, ...]  # weights, or factors of an adapter


def source_graph(layers: int, flash: bool) -> dict[str, tuple[str, ...]]:
    """Return the sources of each node of the loss, in order; a name without sources is a weight."""
    sources: dict[str, tuple[str, ...]] = {
        "loss": ("output", "last"),
        "last": ("output_norm", f"x{layers}"),
        "x0": ("token_embd",),
    }
    for i in range(layers):
        block = f"blk.{i}"
        sources |= {
            f"x{i + 1}": (f"down{i}", f"y{i}"),
            f"down{i}": (f"{block}.ffn_down", f"gated{i}"),
            f"gated{i}": (f"gate{i}", f"up{i}"),
            f"gate{i}": (f"{block}.ffn_gate", f"z{i}"),
            f"up{i}": (f"{block}.ffn_up", f"z{i}"),
            f"z{i}": (f"{block}.ffn_norm", f"y{i}"),
            f"y{i}": (f"out{i}", f"x{i}"),
            f"out{i}": (f"{block}.attn_output", f"seen{i}"),
            f"seen{i}": (f"q{i}", f"k{i}", f"v{i}") if flash else (f"v{i}", f"k{i}", f"q{i}"),
            f"q{i}": (f"{block}.attn_q", f"w{i}"),
            f"k{i}": (f"{block}.attn_k", f"w{i}"),
            f"v{i}": (f"w{i}", f"{block}.attn_v"),
            f"w{i}": (f"{block}.attn_norm", f"x{i}"),
        }
    return sources


def visit_weights(sources: dict[str, tuple[str, ...]], step: int) -> Iterator[str]:
    """Yield the weights in depth-first order, with sources forwards (1) or backwards (-1)."""
    stack, visited = ["loss"], set[str]()
    while stack:
        name = stack.pop()
        if name not in visited:
            visited.add(name)
            if name not in sources:
                yield name
            stack += sources.get(name, ())[::-step]


def possible_orders(layers: int, adapter: bool) -> Iterator[Order]:
    """Yield all possible orders, the likeliest first.

    An adapter's factors are sources of a product as well.
    """
    for step, flash in product((1, -1), (False, True)):
        halves = (".lora_a", ".lora_b")[::step] if adapter else ("",)
        yield tuple(
            f"{name}.weight{half}"
            for name in visit_weights(source_graph(layers, flash), step)
            for half in halves
        )


# ---- which of them it is ---------------------------------------------------

Shapes = Mapping[str, tuple[int, ...]]  # of the parameters


def order_from_values(
    vector: np.ndarray, weights: Mapping[str, np.ndarray], candidates: Sequence[Order]
) -> Order:
    """Return the order in which a vector of parameter values matches the weights, exactly or most closely."""
    if exact := match_exactly(vector, weights):
        return exact
    shapes = {name: weight.shape for name, weight in weights.items()}

    def distance(order: Order) -> float:
        """Return the sum of absolute differences for an order."""
        return sum(
            float(np.abs(piece - weights[name]).sum()) for name, piece in split_vectors(vector, shapes, order)
        )

    return min(candidates, key=distance)


def match_exactly(vector: np.ndarray, weights: Mapping[str, np.ndarray]) -> Order | None:
    """Return the order if every weight is in the vector bit for bit, else None."""
    remaining, order, offset = {**weights}, list[str](), 0
    while remaining:
        candidates = (
            name
            for name, weight in remaining.items()
            if np.array_equal(weight.ravel()[:16], vector[offset : offset + weight.size][:16])
        )
        name = next(
            (
                candidate
                for candidate in candidates
                if np.array_equal(
                    remaining[candidate].ravel(), vector[offset : offset + remaining[candidate].size]
                )
            ),
            None,
        )
        if name is None:
            return None
        order.append(name)
        offset += remaining.pop(name).size
    return tuple(order)


def order_from_squares(
    squares: np.ndarray, shapes: Shapes, rows: str, candidates: Sequence[Order]
) -> Order | None:
    """Return the order that fits second moments.

    Zeros belong to tokens that never occurred: whole rows of one weight. Among several orders the one with
    the least variance within weights is taken.
    """
    fitting = [
        order
        for order in candidates
        if count_stray_zeros(squares == 0, shapes, rows, order) <= squares.size // 100
    ]
    if len(fitting) < 2:
        return fitting[0] if fitting else None
    logarithms = np.log(squares, out=np.full_like(squares, np.nan), where=squares > 0)

    def spread(order: Order) -> float:
        """Return the summed variance of the weights' logarithms for an order."""
        parts = (piece[~np.isnan(piece)] for _, piece in split_vectors(logarithms, shapes, order))
        return sum(float(part.var()) * part.size for part in parts if part.size)

    return min(fitting, key=spread)


def count_stray_zeros(zero: np.ndarray, shapes: Shapes, rows: str, order: Order) -> int:
    """Count zeros that do not form whole rows; whole factors are zero in the first steps."""
    stray = 0
    for name, piece in split_vectors(zero, shapes, order):
        if not piece.all():
            whole = piece.all(-1).sum() * piece.shape[-1] if name == rows else 0
            stray += int(piece.sum() - whole)
    return stray


def split_vectors(vectors: np.ndarray, shapes: Shapes, order: Order) -> Iterator[tuple[str, np.ndarray]]:
    """Yield name and piece of flat vectors, each in its shape."""
    offset = 0
    for name in order:
        size = prod(shapes[name])
        yield name, vectors[..., offset : offset + size].reshape(*vectors.shape[:-1], *shapes[name])
        offset += size
