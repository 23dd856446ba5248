"""Estimates what a step costs, in seconds of a nominal processor.

What is chosen by this cost must not depend on a clock: splitting a batch or copying a base changes the bits.
"""

from collections.abc import Callable

from llamatrain.graph.int8 import INT8_FORMS
from llamatrain.graph.op_cost import estimate_cost, quantized_bytes
from llamatrain.graph.remat_policy import Policy
from llamatrain.graph.tensor import Node, collect_nodes
from llamatrain.model.limits import MANY_LAYERS
from llamatrain.planner.layers import layers_are_alike, with_layers
from llamatrain.planner.memory import MemoryPlan
from llamatrain.train.graphs import StepGraph, StepGraphs, StepSpec

# seconds of one thread
CALL_SECONDS = 2e-6
FLOP_SECONDS = 1.6e-11
BYTE_SECONDS = 1e-10
EXP_SECONDS = 3e-9
DEQUANT_SECONDS = 3.8e-10
BF16_FACTOR = 0.5  # relative to FLOP_SECONDS
INT8_FACTOR = 0.4
SAMPLE_DEPTHS = 3, 4  # layers of the models from which the cost of a deeper one is extrapolated

NodeCost = Callable[[Node], float]


def nominal_cost(node: Node) -> float:
    """Return the nominal seconds of a node."""
    if node.op.layout or not any(output.size for output in node.outputs):
        return 0.0
    cost = estimate_cost(node)
    is_bf16 = node.sources and node.sources[0].dtype.size < 4
    factor = INT8_FACTOR if node.op in INT8_FORMS.values() else BF16_FACTOR if is_bf16 else 1.0
    return (
        CALL_SECONDS
        + FLOP_SECONDS * factor * cost.flops
        + BYTE_SECONDS * cost.bytes_moved
        + EXP_SECONDS * cost.exponentials
        + DEQUANT_SECONDS * cost.dequantized
    )


def step_cost(graphs: StepGraphs, length: int, batches: int, node_cost: NodeCost = nominal_cost) -> float:
    """Return the cost of a step of `batches` batches with rows of `length` tokens."""
    spec = graphs.spec

    def graph_cost(graph: StepGraph) -> float:
        return sum(map(node_cost, collect_nodes(spec.device.rewrite(graph.outputs))))

    if spec.gradients == "streamed":
        return batches * graph_cost(graphs.streamed_graph(length))
    cost = graph_cost(graphs.grad_graph(length, True))
    if batches > 1:
        cost += (batches - 1) * graph_cost(graphs.grad_graph(length, False))
    if spec.rule and spec.groups == 1:  # there is no graph for an update that ranks share
        cost += graph_cost(graphs.update_graph(length))
    return cost


class StepCost:
    """The cost of a step by recomputation policy.

    A deep model whose layers are alike is extrapolated from two shallow ones.
    """

    def __init__(self, spec: StepSpec, length: int, batches: int, node_cost: NodeCost = nominal_cost) -> None:
        self.layers, self.length, self.batches, self.node_cost = spec.h.layers, length, batches, node_cost
        is_deep = self.layers > SAMPLE_DEPTHS[-1] and layers_are_alike(spec)
        self.specs = [with_layers(spec, n) for n in SAMPLE_DEPTHS] if is_deep else [spec]
        self._known: dict[Policy, float] = {}

    def cost(self, policy: Policy) -> float:
        """Return the cost with a policy; a number of recomputed blocks lies between "light" and "block"."""
        if str(policy).isdecimal():
            share = min(1.0, int(policy) / max(1, self.layers - 1))
            return self.cost("light") + share * (self.cost("block") - self.cost("light"))
        if policy not in self._known:
            costs = [
                step_cost(StepGraphs(spec, policy), self.length, self.batches, self.node_cost)
                for spec in self.specs
            ]
            deeper = (self.layers - SAMPLE_DEPTHS[0]) / (SAMPLE_DEPTHS[1] - SAMPLE_DEPTHS[0])
            self._known[policy] = costs[0] + deeper * (costs[-1] - costs[0])
        return self._known[policy]


def plan_cost(plan: MemoryPlan, batches: int, node_cost: NodeCost) -> float:
    """Return the sum of a cost over all nodes of a planned step of this many batches."""
    spec, micro_batches = plan.spec, batches * plan.splits
    if spec.h.layers > MANY_LAYERS:
        return StepCost(spec, spec.rope_length, micro_batches, node_cost).cost(plan.policy)
    return step_cost(plan.graphs, spec.rope_length, micro_batches, node_cost)


def base_bytes_read(plan: MemoryPlan, batches: int) -> int:
    """Return the bytes of quantized weights that a step of this many batches reads from the base's file."""
    own = {weight.stored for weight in plan.spec.rounded.values()}  # they are in memory

    def bytes_from_file(node: Node) -> float:
        return 0 if own.intersection(node.sources) else quantized_bytes(node)

    return 0 if plan.own_memory else int(plan_cost(plan, batches, bytes_from_file))
