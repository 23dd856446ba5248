"""Orders the nodes of a graph.

There are two candidates, as in ggml: depth first with sources from left to right, or from right to left; the
planner takes the one with the lower peak. Nodes that change memory in place wait for all readers of the old
value and then run as early as possible, so that a gradient is consumed as soon as it exists. A caller may
also prescribe the order of some values; since nodes run one at a time, this replaces ggml's barriers between
unconnected nodes.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from llamatrain.errors import GraphError
from llamatrain.graph.ops import cont, contiguous
from llamatrain.graph.rewrite import rebuild
from llamatrain.graph.tensor import Layout, Node, Tensor, collect_nodes, dense, find_base


def find_layout(tensor: Tensor) -> tuple[Tensor, Layout]:
    """Return the tensor that owns a tensor's memory, and the layout in it."""
    views: list[Node] = []
    while tensor.node and tensor.node.op.layout:
        views.append(tensor.node)
        (tensor,) = tensor.node.sources
    layout = Layout(0, dense(tensor.shape))
    for node in reversed(views):
        next_layout = _apply_view(node, layout)
        if next_layout is None:
            raise GraphError(
                f"{node!r} cannot be a view of its source's layout; make the source contiguous first",
                code="invalid-view",
            )
        layout = next_layout
    return tensor, layout


def find_owner(tensor: Tensor) -> Tensor:
    """Return the tensor in whose memory a tensor lies, through views and in-place changes."""
    while node := tensor.node:
        if node.op.layout:
            (tensor,) = node.sources
        elif tensor.index in node.aliases:
            tensor = node.sources[node.aliases[tensor.index]]
        else:
            break
    return tensor


def make_contiguous(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Insert copies in C order where a kernel would read a view that is not contiguous."""
    copies: dict[Tensor, Tensor] = {}
    layouts: dict[Tensor, Layout] = {}

    def layout_of(tensor: Tensor) -> Layout:
        if tensor not in layouts:
            node = tensor.node
            seen = _apply_view(node, layout_of(node.sources[0])) if node and node.op.layout else None
            layouts[tensor] = seen or Layout(0, dense(tensor.shape))  # a tensor that is not a view is dense
        return layouts[tensor]

    def dense_copy(tensor: Tensor) -> Tensor:
        if contiguous(layout_of(tensor), tensor.shape):
            return tensor
        if tensor not in copies:
            copies[tensor] = cont(tensor)
        return copies[tensor]

    def copy_if_written(source: Tensor, node: Node) -> Tensor:
        """Copy a source that an in-place change would read while it writes there."""
        changed = [node.sources[index] for index in node.aliases.values()]
        return (
            cont(source)
            if source not in changed and any(find_base(source) is find_base(each) for each in changed)
            else source
        )

    def change(node: Node) -> Node | None:
        if node.op.takes_views or (node.op.layout and _apply_view(node, layout_of(node.sources[0]))):
            return None
        sources = tuple(copy_if_written(dense_copy(source), node) for source in node.sources)
        for source in (node.sources[index] for index in node.aliases.values()):
            if dense_copy(source) is not source:
                raise GraphError(
                    f"{node!r} changes {source!r} in place, but that is a view that is not in C order",
                    code="invalid-in-place",
                )
        return node.with_sources(sources)

    return rebuild(outputs, {}, change)


def _apply_view(node: Node, at: Layout) -> Layout | None:
    return node.op.layout(at, node.sources[0].spec, node.outputs[0].spec, **node.attrs)  # type: ignore[misc]


def order_nodes(
    outputs: Sequence[Tensor], left_to_right: bool = True, value_order: Sequence[Tensor] = ()
) -> list[Node]:
    """Return the nodes in an order to run them.

    Values of `value_order` are computed in that order, each as late as possible.
    """
    nodes = collect_nodes(outputs)
    fixed_order = _nodes_in_order(value_order, nodes)
    before = _readers_before_changes(nodes)
    users: dict[Node, list[Node]] = defaultdict(list)  # for each node, the changes that wait for it
    for change, readers in before.items():
        for needed in [*readers, *(source.node for source in change.sources if source.node)]:
            users[needed].append(change)
    done: dict[Node, None] = {}

    def needs(node: Node) -> list[Node]:
        sources = [source.node for source in node.sources if source.node]
        wanted = [*sources, *before.get(node, ())]
        return [each for each in (reversed(wanted) if left_to_right else wanted) if each not in done]

    def emit(node: Node) -> None:
        done[node] = None
        for change in users.get(node, ()):
            if change not in done and change not in fixed_order and not needs(change):
                done[change] = None

    for root in [*fixed_order, *sorted((output.node for output in outputs if output.node), key=_readiness)]:
        waiting, open_ = [root], set[Node]()
        while waiting:
            node = waiting[-1]
            if node in done:
                waiting.pop()
            elif missing := needs(node):
                if node in open_ and any(each in open_ for each in missing):
                    raise GraphError(
                        f"{node!r} waits for itself: it changes memory that is read after it",
                        code="graph-cycle",
                    )
                open_.add(node)
                waiting.extend(missing)
            else:
                waiting.pop()
                emit(node)
    _check_order(fixed_order, list(done))
    return list(done)


def _nodes_in_order(value_order: Sequence[Tensor], nodes: Sequence[Node]) -> dict[Node, None]:
    """Return the nodes of the values of a prescribed order."""
    known = set(nodes)
    for tensor in value_order:
        if tensor.node not in known:
            raise GraphError(
                f"{tensor!r} has a prescribed order, but no output needs it", code="invalid-order"
            )
    return dict.fromkeys(tensor.node for tensor in value_order if tensor.node)


def _check_order(fixed_order: Iterable[Node], done: Sequence[Node]) -> None:
    places = {node: place for place, node in enumerate(done)}
    for before, after in pairwise(fixed_order):
        if places[before] > places[after]:
            raise GraphError(f"{after!r} cannot run after {before!r}, which needs it", code="invalid-order")


def _readiness(node: Node) -> int:
    """Return a sort key that places in-place roots as soon as their sources exist."""
    if not node.aliases:
        return node.serial
    return max(
        (source.node.serial for source in node.sources if source.node and source.node.sources),
        default=node.serial,
    )


def _readers_before_changes(nodes: Sequence[Node]) -> dict[Node, list[Node]]:
    """Return, for each node that changes memory, the nodes that read the old value through any view."""
    changes = [node for node in nodes if node.aliases]
    readers: dict[Tensor, list[Node]] = defaultdict(list)
    if changes:
        for node in nodes:
            if not node.op.layout:
                for source in node.sources:
                    readers[find_base(source)].append(node)
    return {
        change: [
            node
            for index in change.aliases.values()
            for node in readers[find_base(change.sources[index])]
            if node is not change
        ]
        for change in changes
    }
