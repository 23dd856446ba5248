"""Reverse-mode differentiation: from a graph to the graph of its gradients."""

from collections.abc import Sequence

from llamatrain.errors import GraphError
from llamatrain.graph.ops import add, cont, fill, permute, sum_to
from llamatrain.graph.rewrite import rebuild
from llamatrain.graph.tensor import I32, Node, QuantizedType, ShapeError, Tensor, collect_nodes


def value_and_gradients(loss: Tensor, wrt: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the loss to run, and its gradient with respect to each tensor of `wrt`.

    The loss may differ from the one passed in: an op that computes its value and its gradient in one pass
    gives both.
    """
    if loss.shape != ():
        raise GraphError(f"a loss must be one number (got {loss!r})", code="loss-not-scalar")
    if frozen := [tensor for tensor in wrt if isinstance(tensor.dtype, QuantizedType)]:
        raise GraphError(f"{frozen[0]!r} is quantized and cannot be trained", code="quantized-not-trainable")
    path = collect_nodes([loss])
    needed = _depends_on(path, wrt)
    grads: dict[Tensor, Tensor] = {loss: fill(shape=(), value=1.0, dtype=loss.dtype)}
    values: dict[Tensor, Tensor] = {}
    for node in reversed(path):
        dys = [grads.get(output) for output in node.outputs]
        if not any(dys) or not any(output in needed for output in node.outputs):
            continue
        for source, grad in zip(node.sources, _source_gradients(node, dys, needed), strict=True):
            if grad is not None and source in needed:
                # computed by this rule
                if (producer := grad.node) and producer.op.value_output is not None and grad not in dys:
                    values[node.outputs[0]] = producer.outputs[producer.op.value_output]
                grad = sum_to(grad, source.shape)
                grads[source] = add(grads[source], grad) if source in grads else grad
    if missing := [tensor for tensor in wrt if tensor not in grads]:
        raise GraphError(
            f"the loss does not depend on {', '.join(repr(tensor) for tensor in missing)}",
            code="no-dependency",
        )
    return _with_values(loss, [_in_order(grads[tensor]) for tensor in wrt], values)


def _in_order(grad: Tensor) -> Tensor:
    """Return a gradient in C order: that of a tensor that was permuted is a view."""
    return cont(grad) if grad.node and grad.node.op is permute else grad


def gradients(loss: Tensor, wrt: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradient of a loss with respect to each tensor of `wrt`."""
    return value_and_gradients(loss, wrt)[1]


def _depends_on(path: Sequence[Node], wrt: Sequence[Tensor]) -> set[Tensor]:
    """Return the tensors that depend on one of `wrt`; gradients flow only through these."""
    needed = set(wrt)
    for node in path:
        if not node.op.stops_gradient and any(source in needed for source in node.sources):
            needed.update(node.outputs)
    return needed


def _source_gradients(
    node: Node, dys: Sequence[Tensor | None], needed: set[Tensor]
) -> Sequence[Tensor | None]:
    op = node.op
    if op.gradient is None:
        raise GraphError(
            f"{node!r} has no gradient: {op.no_gradient or f'{op.name} has no gradient rule'}",
            code="no-gradient",
        )
    wanted = tuple(source in needed for source in node.sources)
    try:
        found = op.gradient(node, *dys, wanted=wanted) if op.selective else op.gradient(node, *dys)
    except ShapeError as error:
        raise GraphError(f"{node!r} has no gradient: {error}", code="no-gradient") from None
    if len(found) != len(node.sources):
        raise GraphError(
            f"the gradient rule of {op.name} returned {len(found)} gradients for {len(node.sources)} sources",
            code="wrong-gradient-count",
        )
    for source, grad, asked in zip(node.sources, found, wanted, strict=True):
        if asked and grad is None and source.dtype is not I32:
            raise GraphError(f"{node!r} has no gradient of {source!r}", code="no-gradient")
    return found


def _with_values(
    loss: Tensor, grads: list[Tensor], values: dict[Tensor, Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Use the values that gradient ops compute on their way, except where such an op needs the value itself."""
    taken = {old: new for old, new in values.items() if new.node and old.node not in collect_nodes([new])}
    loss, *grads = rebuild([loss, *grads], taken, lambda node: None) if taken else [loss, *grads]
    return loss, grads
