"""The order in which the vectors of llama.cpp's old optimizers hold the parameters: that in which its graph meets them.

The graph is gone through depth first from the loss, an op's sources from left to right or from right to left: whichever took
less memory, and the file does not say which; nor whether attention was an op of its own (flash) or made of products. So what
lies in the vectors tells.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod

import numpy as np

Order = tuple[str, ...]  # of weights; of adapters, their factors


def graph(layers: int, flash: bool) -> dict[str, tuple[str, ...]]:
    """The sources of what the loss is made of, in their order; what has none is a weight."""
    made: dict[str, tuple[str, ...]] = {
        "loss": ("output", "last"),
        "last": ("output_norm", f"x{layers}"),
        "x0": ("token_embd",),
    }
    for i in range(layers):
        at = f"blk.{i}"
        made |= {
            f"x{i + 1}": (f"down{i}", f"y{i}"),
            f"down{i}": (f"{at}.ffn_down", f"gated{i}"),
            f"gated{i}": (f"gate{i}", f"up{i}"),
            f"gate{i}": (f"{at}.ffn_gate", f"z{i}"),
            f"up{i}": (f"{at}.ffn_up", f"z{i}"),
            f"z{i}": (f"{at}.ffn_norm", f"y{i}"),
            f"y{i}": (f"out{i}", f"x{i}"),
            f"out{i}": (f"{at}.attn_output", f"seen{i}"),
            f"seen{i}": (f"q{i}", f"k{i}", f"v{i}") if flash else (f"v{i}", f"k{i}", f"q{i}"),
            f"q{i}": (f"{at}.attn_q", f"w{i}"),
            f"k{i}": (f"{at}.attn_k", f"w{i}"),
            f"v{i}": (f"w{i}", f"{at}.attn_v"),
            f"w{i}": (f"{at}.attn_norm", f"x{i}"),
        }
    return made


def met(sources: dict[str, tuple[str, ...]], step: int) -> Iterator[str]:
    """The weights as they turn up, by way of each op's sources forwards (1) or backwards (-1)."""
    left, seen = ["loss"], set[str]()
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            if name not in sources:
                yield name
            left += sources.get(name, ())[::-step]


def orders(layers: int, adapter: bool) -> Iterator[Order]:
    """All that can be, the likeliest first. Beside a weight, an adapter's factors are a product's sources, too."""
    for step, flash in product((1, -1), (False, True)):
        halves = (".lora_a", ".lora_b")[::step] if adapter else ("",)
        yield tuple(f"{name}.weight{half}" for name in met(graph(layers, flash), step) for half in halves)


# ---- which of them it is ---------------------------------------------------

Shapes = Mapping[str, tuple[int, ...]]  # of the parameters


def of_values(held: np.ndarray, weights: Mapping[str, np.ndarray], known: Sequence[Order]) -> Order:
    """Where the parameters themselves are held: that of the weights, or the one in which they come nearest to them."""
    if found := same(held, weights):
        return found
    shapes = {name: weight.shape for name, weight in weights.items()}

    def distance(order: Order) -> float:
        return sum(float(np.abs(piece - weights[name]).sum()) for name, piece in pieces(held, shapes, order))

    return min(known, key=distance)


def same(held: np.ndarray, weights: Mapping[str, np.ndarray]) -> Order | None:
    """The weights one by one, as far as they lie there bit for bit."""
    left, order, at = {**weights}, list[str](), 0
    while left:
        here = (
            name
            for name, weight in left.items()
            if np.array_equal(weight.ravel()[:16], held[at : at + weight.size][:16])
        )
        name = next(
            (each for each in here if np.array_equal(left[each].ravel(), held[at : at + left[each].size])),
            None,
        )
        if name is None:
            return None
        order.append(name)
        at += left.pop(name).size
    return tuple(order)


def of_squares(squares: np.ndarray, shapes: Shapes, rows: str, known: Sequence[Order]) -> Order | None:
    """Of moments: those that are zero belong to tokens never seen, whole rows of one weight; and those of a weight are alike."""
    fit = [order for order in known if astray(squares == 0, shapes, rows, order) <= squares.size // 100]
    if len(fit) < 2:
        return fit[0] if fit else None
    logarithms = np.log(squares, out=np.full_like(squares, np.nan), where=squares > 0)

    def spread(order: Order) -> float:
        each = (piece[~np.isnan(piece)] for _, piece in pieces(logarithms, shapes, order))
        return sum(float(some.var()) * some.size for some in each if some.size)

    return min(fit, key=spread)


def astray(zero: np.ndarray, shapes: Shapes, rows: str, order: Order) -> int:
    """How many zeros do not make whole rows; the first steps leave whole factors at zero, too."""
    found = 0
    for name, piece in pieces(zero, shapes, order):
        if not piece.all():
            whole = piece.all(-1).sum() * piece.shape[-1] if name == rows else 0
            found += int(piece.sum() - whole)
    return found


def pieces(vectors: np.ndarray, shapes: Shapes, order: Order) -> Iterator[tuple[str, np.ndarray]]:
    """Flat vectors cut into what they hold, each in its shape."""
    at = 0
    for name in order:
        size = prod(shapes[name])
        yield name, vectors[..., at : at + size].reshape(*vectors.shape[:-1], *shapes[name])
        at += size
