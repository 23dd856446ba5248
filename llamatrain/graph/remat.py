"""Gradient checkpointing: forward values are not kept for the gradients but recomputed next to their use.

Also known as rematerialization or activation recomputation (Chen et al. 2016). It is a rewrite: the nodes of
a segment are cloned, from the values that are kept at its border, for the gradient nodes that read them.
Nothing else changes: the planner sees shorter lifetimes and finds the saving by itself, and the same kernels
on the same inputs give the same bits.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from llamatrain.graph.ops import flash_attn
from llamatrain.graph.remat_policy import SEGMENT, Policy, parse_policy
from llamatrain.graph.tensor import Node, Tensor, collect_nodes, find_base


def recompute(
    outputs: Sequence[Tensor],
    forward: Iterable[Tensor],
    keep: Iterable[Tensor],
    among: Iterable[Tensor] | None = None,
) -> list[Tensor]:
    """Return the outputs with gradient nodes reading recomputed values.

    `forward` are results of the forward part (such as the loss): what they need is never cloned for each
    other. `keep` are the values that are kept, at the borders of segments. With `among`, only those values
    and what they hide are recomputed.
    """
    original = {node.serial for node in collect_nodes(forward)}
    kept, limited = set(keep), None if among is None else set(among)
    new: dict[Tensor, Tensor] = {}
    clones: dict[Tensor, Tensor] = {}

    def is_cloned(tensor: Tensor) -> bool:
        node = tensor.node
        inside = node is not None and node.serial in original and not node.aliases
        return inside and tensor not in kept and (limited is None or tensor in limited)

    def clone(tensor: Tensor) -> Tensor:
        waiting = [tensor]
        while waiting:
            node = waiting[-1].node
            if waiting[-1] in clones or node is None:
                waiting.pop()
                continue
            if missing := [source for source in node.sources if is_cloned(source) and source not in clones]:
                waiting.extend(missing)
                continue
            sources = tuple(clones.get(source, source) for source in node.sources)
            again = Node(
                node.op, sources, node.attrs, f"{node.outputs[0].name}'" if node.outputs[0].name else ""
            )
            clones.update(zip(node.outputs, again.outputs, strict=True))
        return clones[tensor]

    for node in collect_nodes(outputs):
        if node.serial in original:
            continue
        sources = tuple(clone(s) if is_cloned(s) else new.get(s, s) for s in node.sources)
        # a new serial, so that gradient nodes come after their clones
        fresh = Node(node.op, sources, node.attrs, node.outputs[0].name)
        new.update(zip(node.outputs, fresh.outputs, strict=True))
    return [new.get(output, output) for output in outputs]


# ---- policies --------------------------------------------------------------


def apply_policy(
    outputs: Sequence[Tensor], forward: Tensor, borders: Sequence[Tensor], policy: Policy
) -> list[Tensor]:
    """Apply a recomputation policy. `borders` are the values between blocks, beginning with the first block's input.

    The last block is left alone: it would be recomputed at the very moment of the peak.
    """
    if policy == "none":
        return list(outputs)
    borders = borders_with_gradient(outputs, forward, borders)
    parts = segments(forward, borders)[:-1]
    if policy == "optimal":
        result = recompute(outputs, [forward], borders, [tensor for part in parts for tensor in part])
        return recompute(
            result,
            [forward],
            choose_borders(borders),
            [*borders, *(tensor for part in parts for tensor in part)],
        )
    recomputed, segment_values, first = list[Tensor](), list[Tensor](), 0
    for way, count in parse_policy(policy, len(parts)):
        for border, part in zip(borders[first : first + count], parts[first : first + count], strict=True):
            recomputed += [tensor for tensor in part if _is_recomputed(tensor, border, way)]
        if way == SEGMENT:
            segment_values += [
                *borders[first + 1 : first + count],
                *(tensor for part in parts[first : first + count] for tensor in part),
            ]
        first += count
    result = recompute(outputs, [forward], borders, recomputed)
    if not segment_values:
        return result
    inner = set(segment_values)
    return recompute(result, [forward], [border for border in borders if border not in inner], segment_values)


def _is_recomputed(tensor: Tensor, border: Tensor, way: str) -> bool:
    if way in ("none", "light"):
        return way == "light" and _is_light(tensor)
    if way in ("wide", "products"):
        attended = tensor.node is not None and tensor.node.op is flash_attn
        return _is_light(tensor) or (not attended and (way == "products" or tensor.size > border.size))
    return True


def borders_with_gradient(
    outputs: Sequence[Tensor], forward: Tensor, borders: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Return the borders from the first one behind which a gradient reads a value.

    Blocks before it need not be recomputed.
    """
    original = {node.serial for node in collect_nodes([forward])}
    read = {
        find_base(source)
        for node in collect_nodes(outputs)
        if node.serial not in original
        for source in node.sources
    }
    parts = (any(find_base(tensor) in read for tensor in part) for part in segments(forward, borders))
    return borders[next((place for place, needed in enumerate(parts) if needed), len(borders)) :]


def choose_borders(borders: Sequence[Tensor]) -> list[Tensor]:
    """Return every a-th of n borders, and those after the last of them, where gradients begin.

    The others are recomputed before their blocks are, a segment of a blocks at a time: n/a + a borders are
    fewest at a = sqrt(n).
    """
    spacing = max(1, round(math.sqrt(len(borders))))
    last = (len(borders) - 1) // spacing * spacing
    return [border for place, border in enumerate(borders) if place % spacing == 0 or place > last]


def segments(forward: Tensor, borders: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the values between one border and the next, and after the last."""
    nodes = collect_nodes([forward])
    places = {output: place for place, node in enumerate(nodes) for output in node.outputs}
    cuts = [*(places.get(border, -1) for border in borders), len(nodes)]
    return [[output for node in nodes[lo + 1 : hi] for output in node.outputs] for lo, hi in pairwise(cuts)]


def _is_light(tensor: Tensor) -> bool:
    """Return True if a value is cheap to recompute.

    A cast to a smaller type is not: recomputing it would keep its larger source.
    """
    node = tensor.node
    if node is None or not node.op.is_cheap:
        return False
    return tensor.dtype.size >= node.sources[0].dtype.size or _is_light(find_base(node.sources[0]))
