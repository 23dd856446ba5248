"""Gradient checkpointing: values of the forward part are not kept for the gradients but made again beside their use.

Also known as rematerialisation or activation recomputation (Chen et al. 2016). Here it is a rewrite: the nodes of a segment
are cloned, from the values that are kept at its border, for the gradient nodes that read them. Nothing else changes: the
planner sees shorter lives and finds the saving by itself, and the same kernels on the same inputs give the same bits.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from llamatrain.errors import GraphError
from llamatrain.graph.tensor import Node, Tensor, nodes_of


def recompute(
    outputs: Sequence[Tensor], forward: Iterable[Tensor], keep: Iterable[Tensor], among: Iterable[Tensor] | None = None
):
    """The outputs with gradient nodes reading recomputed values.

    `forward` are results of the forward part (the loss, say): what they need is never cloned for each other. `keep` are the
    values that stay, at the borders of segments. With `among`, only those values and what they hide are recomputed.
    """
    original = {node.serial for node in nodes_of(forward)}
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
            again = Node(node.op, sources, node.attrs, f"{node.outputs[0].name}'" if node.outputs[0].name else "")
            clones.update(zip(node.outputs, again.outputs, strict=True))
        return clones[tensor]

    for node in nodes_of(outputs):
        if node.serial in original:
            continue
        sources = tuple(clone(s) if is_cloned(s) else new.get(s, s) for s in node.sources)
        fresh = Node(node.op, sources, node.attrs, node.outputs[0].name)  # a new serial: gradient nodes stay behind their clones
        new.update(zip(node.outputs, fresh.outputs, strict=True))
    return [new.get(output, output) for output in outputs]


# ---- policies --------------------------------------------------------------

POLICIES = ("none", "block", "optimal")


def borders_to_keep(blocks: Sequence[Tensor], policy: str, interior: int) -> list[Tensor]:
    """Which of the borders between blocks to keep. `interior` is what a block's own values take, in bytes.

    Optimal: a segment of a blocks costs n/a borders of v bytes and once a·u bytes of interior; a = sqrt(n·v/u) is least.
    """
    if policy == "block" or not blocks:
        return list(blocks)
    if policy != "optimal":
        raise GraphError(f"unknown recomputation policy {policy!r}; known are {', '.join(POLICIES)}")
    spacing = max(1, round(math.sqrt(len(blocks) * blocks[0].nbytes / max(1, interior))))
    return list(blocks[::spacing])


def segments(forward: Sequence[Tensor], borders: Sequence[Tensor]) -> list[list[Tensor]]:
    """The values between one border and the next, and after the last, in order."""
    order = {node.serial: place for place, node in enumerate(nodes_of(forward))}
    ordered = list(nodes_of(forward))
    places = [order[b.node.serial] if b.node else -1 for b in borders] + [len(ordered)]
    return [[t for node in ordered[lo + 1 : hi] for t in node.outputs] for lo, hi in pairwise(places)]
