"""The role of each node in a training graph: forward, recomputed, backward or optimizer."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Literal

from llamatrain.graph.tensor import Node, Tensor, collect_nodes

NodeRole = Literal["forward", "again", "backward", "optimizer"]
STEPS = ("opt_step_adamw", "opt_step_sgd", "opt_momentum", "clip_factor")


def find_roles(outputs: Iterable[Tensor]) -> dict[Node, NodeRole]:
    """Return the role of each node. The first output is the loss, or the norm for a graph that only updates.

    An op that computes loss and gradients in one pass is backward. A node that repeats a forward node on the
    same values is "again" (recomputed).
    """
    outputs = list(outputs)
    nodes, optimizer_nodes = collect_nodes(outputs), _optimizer_nodes(collect_nodes(outputs))
    forward = {node for node in collect_nodes(outputs[:1]) if node.op.value_output is None}
    roles: dict[Node, NodeRole] = {}
    first: dict[tuple[object, ...], Node] = {}
    originals: dict[Tensor, Tensor] = {}  # recomputed value: original value
    for node in nodes:
        signature = (
            node.op.name,
            repr(node.attrs),
            *(originals.get(source, source) for source in node.sources),
        )
        if node in optimizer_nodes:
            roles[node] = "optimizer"
        elif node in forward:
            roles[node] = "forward"
            first.setdefault(signature, node)
        elif twin := first.get(signature):
            roles[node] = "again"
            originals.update(zip(node.outputs, twin.outputs, strict=True))
        else:
            roles[node] = "backward"
    return roles


def _optimizer_nodes(nodes: list[Node]) -> set[Node]:
    """Return the optimizer's nodes, what depends on them, and what only they read, such as norms."""
    readers: dict[Node, list[Node]] = defaultdict(list)
    optimizer_nodes = set[Node]()
    for node in nodes:
        for producer in {source.node for source in node.sources if source.node}:
            readers[producer].append(node)
            if producer in optimizer_nodes or producer.op.name in STEPS:
                optimizer_nodes.add(node)
    for node in reversed(nodes):
        only_optimizer_reads = all(reader in optimizer_nodes for reader in readers[node]) and readers[node]
        of_leaves = not any(source.node for source in node.sources)
        if node.op.name in STEPS or (only_optimizer_reads and (of_leaves or node.op.name == "sum_sqr")):
            optimizer_nodes.add(node)
    return optimizer_nodes
