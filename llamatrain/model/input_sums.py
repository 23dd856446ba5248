"""The graph that sums the squares of what each weight is multiplied with, for importance matrices.

Weights that are multiplied with the same rows share their sums. The inputs of an expert's last product, ffn_down, are
those without its shares, as in llama.cpp, which multiplies with shares behind that product.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from llamatrain.graph import ops as O
from llamatrain.graph.ops import scale_rows, spread_rows, take_choices
from llamatrain.graph.tensor import Node, Tensor, collect_nodes, placeholder
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.lora import Weights
from llamatrain.model.transformer import forward, make_inputs

INPUTS = ("tokens", "positions", "starts")


@dataclass(frozen=True)
class InputSumsGraph:
    """The inputs of the graph by name, and its outputs by weight, in the order of the forward pass.

    `squares` are (matrices, columns); `counts` (matrices, 1) are the choices of each expert of a stack.
    """

    inputs: dict[str, Tensor]
    present: Tensor  # (1, length): 1 for a token, 0 for padding
    identity: Tensor  # (experts, experts), if there are stacks
    squares: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, Tensor] = field(default_factory=dict)

    @property
    def outputs(self) -> list[Tensor]:
        """The outputs; those of one weight follow each other, so that its input is freed early."""
        pairs = ([square, *self.counts_of(name)] for name, square in self.squares.items())
        return list(dict.fromkeys(output for pair in pairs for output in pair))

    def counts_of(self, name: str) -> list[Tensor]:
        """Return the counts of a stack, in a list that is empty for a matrix."""
        return [self.counts[name]] if name in self.counts else []


def build_input_sums(h: Hyperparameters, weights: Weights, length: int, table: Tensor) -> InputSumsGraph:
    """Build the graph for a row of `length` tokens."""
    dtype, experts = table.dtype, int(h.extra.get("experts", 0))
    inputs = make_inputs(1, length, dtype, flash=True, drop_untrained=False)
    hidden, _ = forward(h, weights.for_rows(length, None), inputs, table)
    present = placeholder("present", (1, length), dtype)
    identity = placeholder("identity", (experts, experts), dtype)
    graph = InputSumsGraph({name: inputs[name] for name in INPUTS}, present, identity)
    sums_of = sums_by_input(graph)
    for node in collect_nodes([hidden]):
        if node.op.name not in ("matmul", "expert_matmul") or node.sources[1].name not in h.shapes:
            continue
        name, found = node.sources[1].name, sums_of(node)
        if found:
            graph.squares[name] = found[0]
            graph.counts.update({name: found[1]} if len(found) > 1 else {})
    graph.squares[h.output_weight] = sum_squares(hidden, present)
    return graph


def sums_by_input(graph: InputSumsGraph) -> Callable[[Node], tuple[Tensor, ...]]:
    """Return a function that gives the sums of a product's rows, the same for products of the same rows."""
    known: dict[tuple[Tensor, ...], tuple[Tensor, ...]] = {}

    def find(node: Node) -> tuple[Tensor, ...]:
        x, order = without_shares(node), node.sources[2] if node.op.name == "expert_matmul" else None
        key = (x, order) if order else (x,)
        if key not in known:
            known[key] = sum_choices(x, order, graph) if order else sum_rows(x, graph.present)
        return known[key]

    return find


def without_shares(node: Node) -> Tensor:
    """Return the rows that a weight is multiplied with, before the multiplication with shares."""
    x, weight, *_ = node.sources
    is_scaled = "ffn_down" in weight.name and x.node is not None and x.node.op.name == "scale_rows"
    return x.node.sources[0] if is_scaled and x.node else x


def sum_rows(x: Tensor, present: Tensor) -> tuple[Tensor, ...]:
    """Return the sums of rows of tokens; nothing for other rows."""
    return (sum_squares(x, present),) if x.shape[:-1] == present.shape[1:] else ()


def sum_squares(x: Tensor, present: Tensor) -> Tensor:
    """Return the sum of squares of each column."""
    return O.matmul_nn(present, O.sqr(x))


def sum_choices(x: Tensor, order: Tensor, graph: InputSumsGraph) -> tuple[Tensor, Tensor]:
    """Return the sums and the counts of each expert."""
    rows = spread_rows(x, order) if len(x.shape) == 2 else x
    tokens, used, columns = rows.shape
    assert order.node
    chosen = O.reshape(
        O.get_rows(graph.identity, order.node.outputs[1]), shape=(tokens * used, graph.identity.shape[0])
    )
    present = O.repeat(O.reshape(graph.present, shape=(tokens, 1)), shape=(tokens, used))
    present = O.reshape(take_choices(present, order), shape=(tokens * used, 1))
    squares = O.sqr(O.reshape(rows, shape=(tokens * used, columns)))
    return O.out_prod(scale_rows(chosen, present), squares), O.out_prod(chosen, present)
