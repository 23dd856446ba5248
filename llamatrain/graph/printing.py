"""A graph for people to look at, as text or as a dot file; and the verifier that each rewrite is checked by."""

from collections.abc import Iterable, Sequence

from llamatrain.errors import GraphError
from llamatrain.graph.tensor import Node, Tensor, collect_leaves, collect_nodes, find_base


def _label(tensor: Tensor) -> str:
    if tensor.node is None:
        return tensor.name.replace('"', "'") or "?"
    part = f".{tensor.index}" if len(tensor.node.outputs) > 1 else ""
    return f"%{tensor.node.serial}{part}"


def as_text(outputs: Sequence[Tensor]) -> str:
    """One line a leaf and one a node, in an order that could be run."""
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
    """The graph in Graphviz's language."""
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
    """A tensor's name; of an unnamed value its op, and the nearest names before it."""
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
    """Each node's outputs are what its op's shape rule says, made after its sources; no tensor is changed twice."""
    changed: dict[Tensor, Node] = {}
    for node in collect_nodes(outputs):
        if tuple(output.spec for output in node.outputs) != node.op.check_specs(
            node.sources, node.attrs, node.name
        ):
            raise GraphError(f"{node!r} does not have the shapes that its op gives it")
        for source in node.sources:
            if source.node and source.node.serial >= node.serial:
                raise GraphError(f"{node!r} stands before its source {source.node!r}")
            if source.node and source.node.outputs[source.index] is not source:
                raise GraphError(f"{node!r} takes a source that {source.node!r} does not make")
        for source in (node.sources[index] for index in node.aliases.values()):
            seen = find_base(source)
            if seen.nbytes != source.nbytes:
                raise GraphError(f"{node!r} changes {source!r} in place, which is only a part of {seen!r}")
            if seen in changed:
                raise GraphError(f"{seen!r} is changed by {changed[seen]!r} and by {node!r}")
            changed[seen] = node
