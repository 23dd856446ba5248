"""Prints a graph as text or as a dot file, and verifies it after each rewrite."""

from collections.abc import Iterable, Sequence

from llamatrain.errors import GraphError
from llamatrain.graph.tensor import Node, Tensor, collect_leaves, collect_nodes, find_base


def _label(tensor: Tensor) -> str:
    if tensor.node is None:
        return tensor.name.replace('"', "'") or "?"
    part = f".{tensor.index}" if len(tensor.node.outputs) > 1 else ""
    return f"%{tensor.node.serial}{part}"


def as_text(outputs: Sequence[Tensor]) -> str:
    """Return the graph as text, one line for each leaf and node, in an order that could run."""
    lines = [
        f"{leaf.role:9} {_label(leaf)}: {leaf.dtype}{list(leaf.shape)}" for leaf in collect_leaves(outputs)
    ]
    for node in collect_nodes(outputs):
        made = ", ".join(f"{_label(t)}: {t.dtype}{list(t.shape)}" for t in node.outputs)
        attrs = "".join(f", {key}={value}" for key, value in node.attrs.items())
        name = f"  # {node.outputs[0].name}" if node.outputs[0].name else ""
        lines.append(f"{made} = {node.op.name}({', '.join(map(_label, node.sources))}{attrs}){name}")
    return "\n".join([*lines, f"gives {', '.join(map(_label, outputs))}"])


def as_dot(outputs: Sequence[Tensor]) -> str:
    """Return the graph in Graphviz's language."""
    lines = ["digraph {", "  node [shape=box fontname=monospace]"]
    shape = lambda tensor: f"{tensor.dtype}{list(tensor.shape)}"
    lines += [
        f'  "{_label(leaf)}" [style=filled label="{leaf.name}\\n{shape(leaf)}"]'
        for leaf in collect_leaves(outputs)
    ]
    for node in collect_nodes(outputs):
        made = " ".join(map(shape, node.outputs))
        lines.append(f'  "%{node.serial}" [label="{node.name}\\n{node.op.name} {made}"]')
        origins = (f"%{source.node.serial}" if source.node else _label(source) for source in node.sources)
        lines += [f'  "{origin}" -> "%{node.serial}"' for origin in origins]
    return "\n".join([*lines, "}"])


def describe(tensor: Tensor) -> str:
    """Return a tensor's name, or its op and the nearest named sources."""
    if tensor.name or not tensor.node:
        return tensor.name or tensor.role
    level, names = list(tensor.node.sources), list[str]()
    while level and not names:
        names = [
            tensor_before.name
            for tensor_before in level
            if tensor_before.name and tensor_before.role != "input"
        ]
        level = list(
            dict.fromkeys(
                source
                for tensor_before in level
                if tensor_before.node
                for source in tensor_before.node.sources
            )
        )
    return f"{tensor.node.op.name} of {', '.join(dict.fromkeys(names))}" if names else tensor.node.op.name


def verify(outputs: Iterable[Tensor]) -> None:
    """Check that a graph is valid.

    Shapes follow the shape rules, nodes come after their sources, and no tensor is changed twice.
    """
    changed: dict[Tensor, Node] = {}
    for node in collect_nodes(outputs):
        if tuple(output.spec for output in node.outputs) != node.infer_specs(node.name):
            raise GraphError(
                f"the outputs of {node!r} do not have the shapes of its op", code="invalid-graph"
            )
        for source in node.sources:
            if source.node and source.node.serial >= node.serial:
                raise GraphError(f"{node!r} comes before its source {source.node!r}", code="invalid-graph")
            if source.node and source.node.outputs[source.index] is not source:
                raise GraphError(
                    f"{node!r} reads a source that {source.node!r} does not compute", code="invalid-graph"
                )
        for source in (node.sources[index] for index in node.aliases.values()):
            seen = find_base(source)
            if seen.nbytes != source.nbytes:
                raise GraphError(
                    f"{node!r} changes {source!r} in place, which is only a part of {seen!r}",
                    code="invalid-in-place",
                )
            if seen in changed:
                raise GraphError(
                    f"{seen!r} is changed by {changed[seen]!r} and by {node!r}", code="invalid-in-place"
                )
            changed[seen] = node
