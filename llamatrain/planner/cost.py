"""What a step costs, as its nodes do: by what was measured, or by speeds that are the same whenever it is asked.

What is chosen by a cost must not depend on a clock: batches in parts and copies of a base have bits of their own.
"""

from collections.abc import Callable

from llamatrain.graph.node_roles import find_roles
from llamatrain.graph.op_cost import estimate_cost
from llamatrain.graph.remat_policy import Policy, scale_policy
from llamatrain.graph.tensor import Node, collect_nodes, find_base
from llamatrain.planner.extrapolate import alike, shallow
from llamatrain.train.graphs import StepGraph, StepGraphs, StepSpec

CALL, FLOP, BYTE, POWER, UNPACKED = (
    2e-6,
    1.6e-11,
    1e-10,
    3e-9,
    3.8e-10,
)  # seconds of each, of a usual processor's thread
HALF = 0.5  # of them for an operation in bf16
FEW = (3, 4)  # layers that tell of many: a first, a last, and those between

Cost = Callable[[Node], float]


def nominal(node: Node) -> float:
    """Seconds, for comparing."""
    if node.op.layout or not any(output.size for output in node.outputs):
        return 0.0
    work, half = estimate_cost(node), node.sources and node.sources[0].dtype.size < 4
    products = FLOP * (HALF if half else 1.0) * work.flops
    return CALL + products + BYTE * work.bytes_moved + POWER * work.exponentials + UNPACKED * work.dequantized


class StepCost:
    """Of steps on so many batches of rows so long, by policies that treat all blocks alike. Of layers that are alike few are
    asked, once for each policy."""

    def __init__(self, setting: StepSpec, length: int, batches: int, of: Cost = nominal) -> None:
        self.layers, self.length, self.batches, self.of = setting.h.layers, length, batches, of
        many = self.layers > FEW[-1] and alike(setting)
        self.settings = [shallow(setting, n) for n in FEW] if many else [setting]
        self._made = dict[tuple[Policy, int], tuple[float, int]]()

    @property
    def few(self) -> int:
        """Layers that tell of a block that is made again."""
        return self.settings[-1].h.layers

    def asked(self, policy: Policy, setting: StepSpec) -> tuple[float, int]:
        """What it costs, and the bytes that the forward part leaves for the gradients."""
        key = scale_policy(policy, self.layers, setting.h.layers), setting.h.layers
        if key not in self._made:
            graphs = StepGraphs(setting, key[0])
            cost = step_of(graphs, self.length, self.batches, self.of)
            streamed = setting.gradients == "streamed"
            self._made[key] = (
                cost,
                kept_of(
                    graphs.streamed_graph(self.length) if streamed else graphs.grad_graph(self.length, True)
                ),
            )
        return self._made[key]

    def cost(self, policy: Policy) -> float:
        costs = [self.asked(policy, setting)[0] for setting in self.settings]
        if len(costs) == 1:
            return costs[0]
        return costs[0] + (costs[1] - costs[0]) * (self.layers - FEW[0]) / (FEW[1] - FEW[0])

    def more(self, policy: Policy, than: Policy) -> float:
        """What it costs besides, for each block that is made again."""
        return (self.asked(policy, self.settings[-1])[0] - self.asked(than, self.settings[-1])[0]) / (
            self.few - 1
        )

    def kept(self, policy: Policy) -> int:
        return self.asked(policy, self.settings[-1])[1]


def kept_of(graph: StepGraph) -> int:
    parts = find_roles(graph.outputs)
    kept = {find_base(source) for node, part in parts.items() if part != "forward" for source in node.sources}
    return sum(tensor.nbytes for tensor in kept if tensor.node and parts[tensor.node] == "forward")


def step_of(graphs: StepGraphs, length: int, batches: int, of: Cost = nominal) -> float:
    setting = graphs.spec

    def whole(graph: StepGraph) -> float:
        return sum(map(of, collect_nodes(graph.outputs)))

    if setting.gradients == "streamed":
        return batches * whole(graphs.streamed_graph(length))
    more = whole(graphs.grad_graph(length, False)) if batches > 1 else 0.0
    update = (
        whole(graphs.update_graph(length)) if setting.rule and setting.groups == 1 else 0.0
    )  # that ranks divide is no graph yet
    return whole(graphs.grad_graph(length, True)) + (batches - 1) * more + update
