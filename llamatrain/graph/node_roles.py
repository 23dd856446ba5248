"""What each node of a training is for: the loss, its gradients, values made again for these, or the optimizer's step."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Literal

from llamatrain.graph.tensor import Node, Tensor, nodes_of

Part = Literal["forward", "again", "backward", "optimizer"]
STEPS = ("opt_step_adamw", "opt_step_sgd", "opt_momentum", "clip_factor")


def parts_of(outputs: Iterable[Tensor]) -> dict[Node, Part]:
    """By the outputs of a program, the first of which is the loss, or the norm of a step alone.

    An op that gives loss and gradients in one pass is of the backward part. Made again is what is done as it was for the loss,
    on the same values.
    """
    outputs = list(outputs)
    nodes, stepping = nodes_of(outputs), _stepping(nodes_of(outputs))
    forward = {node for node in nodes_of(outputs[:1]) if node.op.value is None}
    parts: dict[Node, Part] = {}
    first: dict[tuple[object, ...], Node] = {}
    same: dict[Tensor, Tensor] = {}  # what is made again: what it is
    for node in nodes:
        done = node.op.name, repr(node.attrs), *(same.get(source, source) for source in node.sources)
        if node in stepping:
            parts[node] = "optimizer"
        elif node in forward:
            parts[node] = "forward"
            first.setdefault(done, node)
        elif twin := first.get(done):
            parts[node] = "again"
            same.update(zip(node.outputs, twin.outputs, strict=True))
        else:
            parts[node] = "backward"
    return parts


def _stepping(nodes: list[Node]) -> set[Node]:
    """The optimizer's nodes, what is made of theirs, and what only it reads: norms, and what is made of leaves alone."""
    readers: dict[Node, list[Node]] = defaultdict(list)
    found = set[Node]()
    for node in nodes:
        for made in {source.node for source in node.sources if source.node}:
            readers[made].append(node)
            if made in found or made.op.name in STEPS:
                found.add(node)
    for node in reversed(nodes):
        own = all(reader in found for reader in readers[node]) and readers[node]
        of_leaves = not any(source.node for source in node.sources)
        if node.op.name in STEPS or (own and (of_leaves or node.op.name == "sum_sqr")):
            found.add(node)
    return found
