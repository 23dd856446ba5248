"""What a step costs, as its nodes do: by what was measured, or by speeds that are the same whenever it is asked.

What is chosen by a cost must not depend on a clock: batches in parts and copies of a base have bits of their own.
"""

from collections.abc import Callable

from llamatrain.graph.node_roles import find_roles
from llamatrain.graph.op_cost import estimate_cost
from llamatrain.graph.remat_policy import Policy, scale_policy
from llamatrain.graph.tensor import Node, collect_nodes, find_base
from llamatrain.planner.extrapolate import layers_are_alike, with_layers
from llamatrain.train.graphs import StepGraph, StepGraphs, StepSpec

CALL_SECONDS, FLOP_SECONDS, BYTE_SECONDS, EXP_SECONDS, DEQUANT_SECONDS = (
    2e-6,
    1.6e-11,
    1e-10,
    3e-9,
    3.8e-10,
)  # seconds of each, of a usual processor's thread
BF16_FACTOR = 0.5  # of them for an operation in bf16
SAMPLE_DEPTHS = (3, 4)  # layers that tell of many: a first, a last, and those between

Cost = Callable[[Node], float]


def nominal_cost(node: Node) -> float:
    """Seconds, for comparing."""
    if node.op.layout or not any(output.size for output in node.outputs):
        return 0.0
    work, is_bf16 = estimate_cost(node), node.sources and node.sources[0].dtype.size < 4
    products = FLOP_SECONDS * (BF16_FACTOR if is_bf16 else 1.0) * work.flops
    return (
        CALL_SECONDS
        + products
        + BYTE_SECONDS * work.bytes_moved
        + EXP_SECONDS * work.exponentials
        + DEQUANT_SECONDS * work.dequantized
    )


class StepCost:
    """Of steps on so many batches of rows so long, by policies that treat all blocks alike. Of layers that are alike few are
    asked, once for each policy."""

    def __init__(self, spec: StepSpec, length: int, batches: int, node_cost: Cost = nominal_cost) -> None:
        self.layers, self.length, self.batches, self.node_cost = spec.h.layers, length, batches, node_cost
        is_deep = self.layers > SAMPLE_DEPTHS[-1] and layers_are_alike(spec)
        self.specs = [with_layers(spec, n) for n in SAMPLE_DEPTHS] if is_deep else [spec]
        self._known = dict[tuple[Policy, int], tuple[float, int]]()

    @property
    def sample_depth(self) -> int:
        """Layers that tell of a block that is made again."""
        return self.specs[-1].h.layers

    def _cost_and_kept(self, policy: Policy, spec: StepSpec) -> tuple[float, int]:
        """What it costs, and the bytes that the forward part leaves for the gradients."""
        key = scale_policy(policy, self.layers, spec.h.layers), spec.h.layers
        if key not in self._known:
            graphs = StepGraphs(spec, key[0])
            cost = step_cost(graphs, self.length, self.batches, self.node_cost)
            streamed = spec.gradients == "streamed"
            self._known[key] = (
                cost,
                kept_activations(
                    graphs.streamed_graph(self.length) if streamed else graphs.grad_graph(self.length, True)
                ),
            )
        return self._known[key]

    def cost(self, policy: Policy) -> float:
        costs = [self._cost_and_kept(policy, setting)[0] for setting in self.specs]
        if len(costs) == 1:
            return costs[0]
        return costs[0] + (costs[1] - costs[0]) * (self.layers - SAMPLE_DEPTHS[0]) / (
            SAMPLE_DEPTHS[1] - SAMPLE_DEPTHS[0]
        )

    def cost_per_block(self, policy: Policy, than: Policy) -> float:
        """What it costs besides, for each block that is made again."""
        return (
            self._cost_and_kept(policy, self.specs[-1])[0] - self._cost_and_kept(than, self.specs[-1])[0]
        ) / (self.sample_depth - 1)

    def kept_bytes(self, policy: Policy) -> int:
        return self._cost_and_kept(policy, self.specs[-1])[1]


def kept_activations(graph: StepGraph) -> int:
    roles = find_roles(graph.outputs)
    kept = {find_base(source) for node, role in roles.items() if role != "forward" for source in node.sources}
    return sum(tensor.nbytes for tensor in kept if tensor.node and roles[tensor.node] == "forward")


def step_cost(graphs: StepGraphs, length: int, batches: int, node_cost: Cost = nominal_cost) -> float:
    spec = graphs.spec

    def graph_cost(graph: StepGraph) -> float:
        return sum(map(node_cost, collect_nodes(graph.outputs)))

    if spec.gradients == "streamed":
        return batches * graph_cost(graphs.streamed_graph(length))
    add_cost = graph_cost(graphs.grad_graph(length, False)) if batches > 1 else 0.0
    update = (
        graph_cost(graphs.update_graph(length)) if spec.rule and spec.groups == 1 else 0.0
    )  # that ranks divide is no graph yet
    return graph_cost(graphs.grad_graph(length, True)) + (batches - 1) * add_cost + update
