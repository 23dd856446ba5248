"""Rebuilds graphs with replaced tensors and changed nodes."""

from collections.abc import Callable, Mapping, Sequence

from llamatrain.graph.tensor import Node, Tensor, collect_nodes


def read_stored(outputs: Sequence[Tensor], stored: Mapping[Tensor, Tensor]) -> list[Tensor]:
    """Return the outputs reading leaves in place of values that were stored there before."""
    return rebuild(outputs, dict(stored), lambda node: None) if stored else list(outputs)


def rebuild(
    outputs: Sequence[Tensor],
    replace: dict[Tensor, Tensor],
    change: Callable[[Node], Node | Sequence[Tensor] | None],
) -> list[Tensor]:
    """Return the outputs with tensors replaced and nodes changed; untouched nodes stay the same objects.

    `change` gets each node with its new sources and returns another node, a tensor for each of its outputs,
    or None.
    """
    new = dict(replace)
    for node in collect_nodes(outputs):
        if all(output in new for output in node.outputs):
            continue
        sources = tuple(new.get(source, source) for source in node.sources)
        current = node.with_sources(sources)
        changed = change(current)
        made = changed.outputs if isinstance(changed, Node) else changed or current.outputs
        if made is not node.outputs:
            for old, fresh in zip(node.outputs, made, strict=True):
                new.setdefault(old, fresh)
    return [new.get(output, output) for output in outputs]
