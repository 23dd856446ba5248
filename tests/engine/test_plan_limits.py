"""What a caller says of a plan: how large an arena may be, and which values are made one after the other."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from llamatrain.engine.allocator import Allocation, assign_offsets
from llamatrain.engine.device import create_device
from llamatrain.engine.plan import Plan, plan
from llamatrain.engine.program import Program
from llamatrain.errors import GraphError, MemoryPlanError
from llamatrain.graph import ops as O
from llamatrain.graph.tensor import Node, Tensor, collect_nodes, placeholder, state
from llamatrain.optim.methods.adamw import AdamW
from llamatrain.optim.update_graph import differentiate, streamed_update
from tests.engine.test_plan import SMALL, assert_order, readers_of, rounded
from tests.helpers.random_graphs import RandomGraph, evaluated, random_graphs
from tests.helpers.random_models import llama

often = settings(deadline=None, max_examples=100, suppress_health_check=list(HealthCheck))


def assert_runs(laid: Plan, graph: RandomGraph) -> None:
    """As planned, to what separate arrays give."""
    with np.errstate(all="ignore"):
        expected = evaluated(graph.outputs, graph.arrays)
    program = Program(
        laid, {leaf: array.copy() for leaf, array in graph.arrays.items()}, create_device("reference")
    )
    for arena in program.arenas:
        arena[:] = 0xFF
    program()
    for output in graph.outputs:
        np.testing.assert_array_equal(program.read(output), expected[output])


# ---- arenas of limited size -------------------------------------------------


@often
@given(
    st.lists(st.tuples(st.integers(0, 700), st.integers(0, 20), st.integers(0, 20)), max_size=40),
    st.integers(11, 40),
)
def test_no_place_lies_across_two_arenas(lives: list[tuple[int, int, int]], units: int) -> None:
    most = 64 * units
    blocks = [Allocation(size, min(a, b), max(a, b)) for size, a, b in lives]
    offsets, arenas = assign_offsets(blocks, most)
    spans = [(at, at + rounded(block.size)) for at, block in zip(offsets, blocks, strict=True)]
    assert all(start // most == (end - 1) // most for start, end in spans if start < end)
    for (block, (start, end)), (other, (begin, close)) in combinations(zip(blocks, spans, strict=True), 2):
        if block.size and other.size and block.first <= other.last and other.first <= block.last:
            assert end <= begin or close <= start
    tops = {
        number: max((end for start, end in spans if start // most == number), default=0)
        for number in range(len(arenas))
    }
    assert arenas == [max(0, top - number * most) for number, top in tops.items()]


@often
@given(random_graphs(), st.integers(0, 4))
def test_a_plan_over_several_arenas_gives_the_same(graph: RandomGraph, more: int) -> None:
    assume(graph.outputs and any(tensor.node for tensor in graph.outputs))
    most = max([64, *(rounded(tensor.nbytes) for tensor in plan(graph.outputs).offsets)]) + 64 * more
    laid = plan(graph.outputs, max_arena=most)
    assert max(laid.arenas) <= most
    assert_runs(laid, graph)


def test_a_llama_in_arenas_of_the_size_of_its_largest_value() -> None:
    model = llama(SMALL)
    outputs = streamed_update(differentiate(model.loss, model.trained, borders=model.block_inputs), AdamW())[
        1
    ]
    usual = plan(outputs)
    largest = max(rounded(tensor.nbytes) for tensor in usual.offsets)
    laid = plan(outputs, max_arena=largest)
    assert len(usual.arenas) == 1 < len(laid.arenas) and max(laid.arenas) == largest
    assert usual.arena <= laid.arena < 2 * usual.arena
    assert f"{laid.arena:,} bytes" in laid.report()
    with pytest.raises(
        MemoryPlanError, match=rf"needs [\d,]+ bytes, but an arena has at most {largest - 64:,}"
    ):
        plan(outputs, max_arena=largest - 64)


@pytest.mark.parametrize("most", [0, 63, 100])
def test_arenas_that_cannot_be(most: int) -> None:
    with pytest.raises(GraphError, match=rf"must be a multiple of 64 bytes \(got {most}"):
        plan([O.silu(placeholder("x", (3,)))], max_arena=most)


# ---- an order that is given -------------------------------------------------


def waits_for(node: Node, nodes: list[Node]) -> set[Node]:
    """The nodes that must have run before."""
    changed = [node.sources[index] for index in node.aliases.values()]
    readers = {reader for tensor in changed for reader in readers_of(tensor, nodes)} - {node}
    return readers | {source.node for source in node.sources if source.node}


def any_order(graph: RandomGraph, data: st.DataObject) -> list[Node]:
    left, made = collect_nodes(graph.outputs), list[Node]()
    waiting = {node: waits_for(node, left) for node in left}
    while left:
        ready = [node for node in left if waiting[node] <= set(made)]
        made.append(data.draw(st.sampled_from(ready)))
        left.remove(made[-1])
    return made


@often
@given(random_graphs(12), st.data())
def test_any_order_that_can_be_is_taken(graph: RandomGraph, data: st.DataObject) -> None:
    assume(graph.outputs and any(tensor.node for tensor in graph.outputs))
    nodes = [node for node in any_order(graph, data) if not node.op.layout]
    if data.draw(st.booleans()):
        nodes = [node for node in nodes if data.draw(st.booleans())]
    laid = plan(graph.outputs, order=[node.outputs[0] for node in nodes])
    assert_order(laid, graph.outputs)
    names = iter(
        node.op.name for node in laid.nodes
    )  # copies may have been put in: then other nodes read them
    assert all(node.op.name in names for node in nodes)
    assert_runs(laid, graph)


def two_branches() -> tuple[Tensor, Tensor, Tensor]:
    x = placeholder("x", (4, 16))
    left, right = O.silu(x, name="left"), O.sqr(x, name="right")
    return left, right, O.add(left, right, name="both")


def test_unconnected_values_are_made_as_is_said() -> None:
    left, right, both = two_branches()
    for order in ([left, right], [right, left], [right], [right, left, both]):
        names = [node.name for node in plan([both], order=order).nodes]
        assert [name for name in names if name in {tensor.name for tensor in order}] == [
            tensor.name for tensor in order
        ]
        assert names[-1] == "both" and len(names) == 3


def test_a_change_in_place_waits_for_its_turn() -> None:
    left, right, _ = two_branches()
    change = O.acc(state("sum", (4, 16)), left, slices=((0, 4, 1), (0, 16, 1)), into=True, name="change")
    for order in ([left, right, change], [left, change, right], [right, left, change]):
        assert [node.name for node in plan([change, right], order=order).nodes] == [
            tensor.name for tensor in order
        ]


def test_orders_that_cannot_be() -> None:
    left, right, both = two_branches()
    with pytest.raises(
        GraphError, match=r"left = silu\(x\) cannot run after both = add\(left, right\), which needs it"
    ):
        plan([both], order=[both, left])
    with pytest.raises(GraphError, match=r"right .* has a prescribed order, but no output needs it"):
        plan([left], order=[right])
