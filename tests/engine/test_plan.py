"""The planner without data: lives that never overlap in memory, sizes right to the byte, and words for what does not fit."""

import math
import random
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from llamatrain.engine.allocator import (
    UNLIMITED,
    Allocation,
    LiveIntervals,
    assign_offsets,
    memory_profile,
    place_in_order,
)
from llamatrain.engine.device import create_device
from llamatrain.engine.plan import Plan, Scratch, _lay_out_best, _Lifetimes, plan
from llamatrain.engine.program import Program
from llamatrain.engine.schedule import find_layout, order_nodes
from llamatrain.graph.ops import acc, add, matmul, set_rows, silu, sum_sqr, view
from llamatrain.graph.tensor import I32, Node, Tensor, collect_nodes, parameter, placeholder
from llamatrain.optim.methods.adamw import AdamW
from llamatrain.optim.update_graph import differentiate, hold_gradients, streamed_update, update_step
from llamatrain.platform.memory import ALIGNMENT
from tests.helpers.emulator import SLOWNESS
from tests.helpers.random_graphs import RandomGraph, evaluated, random_graphs
from tests.helpers.random_models import TINY, Llama, M, Size, llama

SMALL = replace(TINY, layers=2, kv_heads=2, ctx=8, batch=2)
often = settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))


def rounded(size: int) -> int:
    return math.ceil(size / 64) * 64


# ---- the order of nodes ----------------------------------------------------


@pytest.mark.parametrize(
    ("needs", "waste", "chosen", "laid_out"),
    [
        ((8, 4), 0, 1, [1]),  # the second is as good as it can be, and the first cannot be
        ((4, 4), 0, 0, [0]),  # equal: the first
        ((4, 8), 0, 0, [0]),
        ((8, 4), 6, 0, [1, 0]),  # the second takes more than it needs
        ((8, 4), 4, 0, [1, 0]),  # then both are equal
        ((8, 4), 3, 1, [1]),
    ],
)
def test_an_order_that_cannot_be_better_is_not_laid_out(
    needs: tuple[int, int], waste: int, chosen: int, laid_out: list[int]
) -> None:
    """Sizes are in units of the alignment; only the second order wastes any."""
    orders = [_Lifetimes([], {}, [Allocation(need * ALIGNMENT, 0, 0)]) for need in needs]
    seen = list[int]()

    def lay_out(lives: _Lifetimes) -> Plan:
        number = next(index for index, order in enumerate(orders) if order is lives)
        seen.append(number)
        arena = (needs[number] + waste * number) * ALIGNMENT
        return Plan({}, [], {}, {}, [arena], without_reuse=number, pinned=frozenset())

    assert _lay_out_best(orders, lay_out).without_reuse == chosen
    assert seen == laid_out


# ---- lives -----------------------------------------------------------------


def owner(tensor: Tensor) -> Tensor:
    """Whose memory a tensor lies in: what a view looks at, what a node changes in place."""
    while tensor.node and (tensor.node.op.layout or tensor.index in tensor.node.aliases):
        tensor = tensor.node.sources[0 if tensor.node.op.layout else tensor.node.aliases[tensor.index]]
    return tensor


def lives_of(laid: Plan) -> dict[Tensor, tuple[int, int]]:
    """For each tensor with a place in the arena: where in the order it is made, and where it is read last."""
    made, read = {}, {}
    for place, node in enumerate(laid.nodes):
        made |= {output: place for output in node.outputs if owner(output) is output}
        if not node.op.layout:
            read |= {owner(source): place for source in node.sources}
    read |= {owner(output): len(laid.nodes) for output in laid.outputs.values()}
    assert {t for t in made if t not in laid.pinned} == set(laid.offsets)
    return {tensor: (made[tensor], max(made[tensor], read.get(tensor, 0))) for tensor in laid.offsets}


def axes_of(tensor: Tensor) -> tuple[int, list[tuple[int, int]]]:
    """Where in its owner's memory a tensor's elements lie: the first, and along each axis of more than one."""
    at = find_layout(tensor)[1]
    return at.offset, [
        (size, stride) for size, stride in zip(tensor.shape, at.strides, strict=True) if size != 1
    ]


def may_take_over(node: Node, output: Tensor, source: Tensor) -> bool:
    """An op with the word for it, over a source that it reads element by element where it writes them."""
    has_word = any(
        index == output.index and owner(node.sources[n]) is source for index, n in node.op.in_place
    )
    return has_word and all(
        axes_of(each) == axes_of(output) for each in node.sources if owner(each) is source
    )


def assert_apart(laid: Plan) -> None:
    """No two values, or a value and a call's scratch memory, lie in the same bytes at the same time."""
    lives = lives_of(laid)
    alive: dict[object, tuple[int, int]] = {}  # first byte, end
    for place, node in enumerate(laid.nodes):
        alive = {t: span for t, span in alive.items() if lives[t][1] >= place}  # type: ignore[index]
        taken: set[object] = set()
        scratch = {node: laid.scratch[node]} if node in laid.scratch else {}
        new = {t: (laid.offsets[t], t.nbytes) for t in node.outputs if t in laid.offsets}
        now: dict[object, tuple[int, int]] = {}
        for each, (offset, size) in [*new.items(), *scratch.items()]:
            assert offset % ALIGNMENT == 0 and offset + rounded(size) <= laid.arena
            for other, (lo, hi) in {**alive, **now}.items():
                if size == 0 or hi <= offset or lo >= offset + size:
                    continue
                dies_here = isinstance(other, Tensor) and other in alive and lives[other][1] == place
                assert dies_here and other not in taken, f"{each} and {other} share memory at {node}"
                assert (lo, hi) == (offset, offset + size) and may_take_over(node, each, other), (
                    f"{each} over {other} at {node}"
                )
                taken.add(other)
            now[each] = (offset, offset + size)
        alive |= {t: span for t, span in now.items() if isinstance(t, Tensor)}


def assert_sizes(laid: Plan) -> None:
    """The arena is no smaller than what is alive at once, and no larger than all of it side by side."""
    sizes = [(rounded(tensor.nbytes), life) for tensor, life in lives_of(laid).items()]
    everything = sum(size for size, _ in sizes) + sum(rounded(size) for _, size in laid.scratch.values())
    assert laid.without_reuse == everything
    for place, node in enumerate(laid.nodes):
        across = sum(size for size, (made, read) in sizes if made < place < read)
        assert across + rounded(laid.scratch.get(node, (0, 0))[1]) <= laid.arena <= everything


def assert_order(laid: Plan, asked: Iterable[Tensor]) -> None:
    places = {node: place for place, node in enumerate(laid.nodes)}
    assert len(places) == len(laid.nodes)
    assert set(asked) <= set(laid.outputs)
    assert set(laid.nodes) == set(collect_nodes(laid.outputs.values()))
    for node, place in places.items():
        assert all(source.node is None or places[source.node] < place for source in node.sources)
    for change in laid.nodes:
        for old in (change.sources[index] for index in change.aliases.values()):
            assert all(
                places[reader] < places[change]
                for reader in readers_of(old, laid.nodes)
                if reader is not change
            )


def readers_of(tensor: Tensor, nodes: list[Node]) -> list[Node]:
    """Who reads a value, itself or through views."""
    found = [node for node in nodes if tensor in node.sources]
    return [
        r for node in found for r in ([node] if not node.op.layout else readers_of(node.outputs[0], nodes))
    ]


def test_nothing_is_written_over_what_is_read_elsewhere() -> None:
    h = silu(placeholder("x", (4, 16)))
    row = view(h, slices=((0, 1, 1), (0, 16, 1)))
    rows = view(h, slices=((1, 3, 1), (0, 16, 1)))
    for out in (
        add(h, row),
        set_rows(h, rows, placeholder("ids", (2,), I32)),
        acc(h, rows, slices=((2, 4, 1), (0, 16, 1))),
    ):
        assert_apart(plan([out]))


def awkward_scratch(node: Node) -> int:
    return (0, 1, 64, 1000, 5000)[(len(node.op.name) + node.outputs[0].size) % 5]


@often
@given(random_graphs(), st.sampled_from((lambda node: 0, awkward_scratch)))
def test_random_lives_never_overlap(graph: RandomGraph, scratch: Scratch) -> None:
    assume(graph.outputs)
    laid = plan(graph.outputs, pinned=graph.pinned, scratch=scratch)
    assert_order(laid, graph.outputs)
    assert_apart(laid)
    assert_sizes(laid)
    assert not {laid.outputs[tensor] for tensor in graph.pinned} & set(laid.offsets)
    assert laid.pinned_bytes == sum(tensor.nbytes for tensor in graph.pinned)


@often
@given(random_graphs(), st.sampled_from((lambda node: 0, awkward_scratch)))
def test_a_naive_plan_gives_each_value_memory_of_its_own(graph: RandomGraph, scratch: Scratch) -> None:
    assume(graph.outputs)
    laid = plan(graph.outputs, pinned=graph.pinned, scratch=scratch, naive=True)
    spans = sorted([(at, t.nbytes) for t, at in laid.offsets.items()] + list(laid.scratch.values()))
    assert all(at + rounded(size) <= following for (at, size), (following, _) in pairwise(spans))
    assert laid.arena == laid.without_reuse == sum(rounded(size) for _, size in spans)
    assert laid.reused == 0


@often
@given(random_graphs())
def test_planner_on_and_naive_give_what_separate_arrays_give(graph: RandomGraph) -> None:
    assume(graph.outputs)
    with np.errstate(all="ignore"):
        expected = evaluated(graph.outputs, graph.arrays)
    for naive in (False, True):
        arrays = {leaf: array.copy() for leaf, array in graph.arrays.items()}
        arrays |= {tensor: np.full(tensor.shape, np.nan, np.float32) for tensor in graph.pinned}
        program = Program.build(graph.outputs, arrays, kernels="reference", naive=naive)
        program.arenas[0][:] = 0xFF  # what is read before it is written shows
        program()
        for output in graph.outputs:
            np.testing.assert_array_equal(program.read(output), expected[output])
        for leaf, array in graph.arrays.items():
            if leaf.role == "input":
                np.testing.assert_array_equal(arrays[leaf], array)


@often
@given(random_graphs(), st.booleans())
def test_both_orders_can_be_run(graph: RandomGraph, left_to_right: bool) -> None:
    assume(graph.outputs)
    nodes = order_nodes(graph.outputs, left_to_right)
    assert_order(Plan({t: t for t in graph.outputs}, nodes, {}, {}, [], 0, frozenset()), graph.outputs)


@often
@given(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 20), st.integers(0, 20)), max_size=40))
def test_places_for_random_lives(lives: list[tuple[int, int, int]]) -> None:
    blocks = [Allocation(size, min(a, b), max(a, b)) for size, a, b in lives]
    offsets, (arena,) = assign_offsets(blocks)
    spans = [(at, at + rounded(block.size)) for at, block in zip(offsets, blocks, strict=True)]
    for (block, (start, end)), (other, (begin, close)) in combinations(zip(blocks, spans, strict=True), 2):
        if block.size and other.size and block.first <= other.last and other.first <= block.last:
            assert end <= begin or close <= start
    assert all(start % ALIGNMENT == 0 for start, _ in spans)
    assert arena == max((end for _, end in spans), default=0)


def test_the_smallest_gap_that_will_do_is_taken() -> None:
    early, late, always = (0, 1), (2, 3), (0, 3)
    blocks = [
        Allocation(960, *early),
        Allocation(896, *always),
        Allocation(832, *early),
        Allocation(768, *always),
        Allocation(640, *late),
    ]
    offsets, (arena,) = assign_offsets(blocks)
    assert arena == 960 + 896 + 832 + 768
    assert offsets == [0, 960, 960 + 896, 960 + 896 + 832, 960 + 896]


def by_looking_at_all(blocks: list[Allocation], order: list[int]) -> list[int]:
    """The same rule in its plainest form."""
    offsets = [0] * len(blocks)
    done: list[int] = []
    for number in order:
        block, size = blocks[number], rounded(blocks[number].size)
        there = [n for n in done if blocks[n].first <= block.last and block.first <= blocks[n].last]
        spans = sorted((offsets[n], offsets[n] + rounded(blocks[n].size)) for n in there)
        tops = [0, *(max(end for _, end in spans[: n + 1]) for n in range(len(spans)))]
        gaps = [
            (start - top, top) for top, (start, _) in zip(tops, spans, strict=False) if start - top >= size
        ]
        offsets[number] = min(gaps)[1] if gaps else tops[-1]
        done.append(number)
    return offsets


@often
@given(
    st.lists(st.tuples(st.integers(1, 700), st.integers(0, 40), st.integers(0, 40)), max_size=40),
    st.randoms(),
)
def test_places_are_those_that_looking_at_all_would_find(
    lives: list[tuple[int, int, int]], rng: random.Random
) -> None:
    blocks = [Allocation(size, min(a, b), max(a, b)) for size, a, b in lives]
    order = rng.sample(range(len(blocks)), len(blocks))
    assert place_in_order(blocks, order, UNLIMITED)[0] == by_looking_at_all(blocks, order)


def largest_first(blocks: list[Allocation]) -> list[int]:
    return sorted(range(len(blocks)), key=lambda number: (-blocks[number].size, blocks[number].first))


@often
@given(
    st.lists(st.tuples(st.integers(1, 700), st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=40)
)
def test_an_arena_is_never_larger_than_with_the_largest_first(lives: list[tuple[int, int, int]]) -> None:
    blocks = [Allocation(size, min(a, b), max(a, b)) for size, a, b in lives]
    fullest = max(
        sum(rounded(block.size) for block in blocks if block.first <= time <= block.last)
        for time in range(41)
    )
    assert fullest == memory_profile(blocks).max() <= sum(assign_offsets(blocks)[1])
    assert sum(assign_offsets(blocks)[1]) <= sum(place_in_order(blocks, largest_first(blocks), UNLIMITED)[1])


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_no_gaps_are_left_beside_gradients_that_stay(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers that are made again, each between more of them: what is there at the fullest moment is all that is taken."""
    model, seen = llama(M), list[list[Allocation]]()
    made = hold_gradients(
        differentiate(
            model.loss, model.trained, precision=precision, borders=model.block_inputs, remat="block"
        ),
        dense=False,
    )
    monkeypatch.setattr(
        "llamatrain.engine.plan.assign_offsets",
        lambda blocks, most: seen.append(blocks) or assign_offsets(blocks, most),
    )
    laid = plan([made.loss, *made.first], scratch=create_device("cpu", 2).scratch)
    assert laid.arena == min(int(memory_profile(blocks).max()) for blocks in seen)
    assert laid.arena < min(
        sum(place_in_order(blocks, largest_first(blocks), UNLIMITED)[1]) for blocks in seen
    )


def looked_at(layers: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many intervals are looked at to place what layers keep until their gradients, and what they need for a moment."""
    seen = list[int]()
    during = LiveIntervals.overlapping
    monkeypatch.setattr(
        LiveIntervals,
        "overlapping",
        lambda self, block: seen.append(len(during(self, block))) or during(self, block),
    )
    moments = [Allocation(320, time, time + 1) for time in range(2 * layers)]
    assign_offsets(
        [
            *(Allocation(size, layer, 2 * layers - layer) for layer in range(layers) for size in (640, 128)),
            *moments,
        ]
    )
    monkeypatch.undo()
    return sum(seen)


def test_places_are_found_in_time_that_grows_with_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each compared with all would be 16 times as many."""
    assert looked_at(800, monkeypatch) < 6 * looked_at(200, monkeypatch)


# ---- a llama ---------------------------------------------------------------


def training(model: Llama, *, remat: str | int = "none", precision: str = "f32") -> list[Tensor]:
    made = differentiate(
        model.loss, model.trained, precision=precision, borders=model.block_inputs, remat=remat
    )
    return streamed_update(made, AdamW())[1]


def numbers(model: Llama) -> int:
    return sum(weight.size for weight in model.trained)


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("remat", ["none", "light", "block", "optimal", 1])
def test_a_llamas_lives_never_overlap(remat: str | int, precision: str) -> None:
    for scratch in (lambda node: 0, awkward_scratch):
        laid = plan(training(llama(SMALL), remat=remat, precision=precision), scratch=scratch)
        assert_apart(laid)
        assert_sizes(laid)
        assert laid.reused > 0


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_a_llama_planned_and_naive_gives_the_same_bits(precision: str) -> None:
    model = llama(SMALL)
    made = differentiate(model.loss, model.trained, precision=precision)
    outputs = [made.loss, *made.grads.values()]
    results = []
    for naive in (False, True):
        program = Program.build(outputs, model.random(), kernels="reference", naive=naive)
        program()
        results.append([program.read(output).tobytes() for output in outputs])
    assert results[0] == results[1]
    assert plan(outputs).arena < plan(outputs, naive=True).arena / 2


BIG = Size(vocab=32000, width=8192, layers=48, heads=64, kv_heads=8, ff=22016, ctx=64, batch=1, lora=8)


@cache
def big_plan(kernels: str) -> tuple[float, Llama, Plan]:
    rule = create_device(kernels, 2).scratch
    start = time.process_time()
    model = llama(BIG)
    laid = plan(training(model, remat="block", precision="bf16"), scratch=rule)
    return time.process_time() - start, model, laid


def assert_big_plan(kernels: str) -> None:
    seconds, model, laid = big_plan(kernels)
    assert seconds < 5 * SLOWNESS
    assert laid.arena <= 256e6
    parts = 8 * sum(
        ins + outs
        for ins, outs in [
            (8192, 8192),
            (8192, 1024),
            (8192, 1024),
            (8192, 8192),
            (8192, 22016),
            (8192, 22016),
            (22016, 8192),
        ]
    )
    norms = 97 * 8192
    assert numbers(model) == 48 * parts + norms  # the embedding and the head are not adapted
    frozen = 48 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 22016) + 2 * 32000 * 8192
    assert laid.role_bytes("parameter") == 4 * numbers(model)
    assert laid.role_bytes("state") == 4 * (frozen + 2 * numbers(model) + model.table.size)


def test_a_very_large_llamas_adapters_need_little() -> None:
    assert_big_plan("reference")


def test_a_very_large_llamas_adapters_need_little_with_the_kernels_scratch() -> None:
    assert_big_plan("cpu")


# ---- sizes right to the byte -----------------------------------------------


def test_a_plan_of_three_thousand_million_parameters() -> None:
    weight, x = parameter("w", (60_000, 50_000)), placeholder("x", (1, 50_000))
    loss = sum_sqr(matmul(x, weight))
    made = differentiate(loss, [weight])
    laid = plan(streamed_update(made, AdamW())[1])
    count = 3_000_000_000
    assert (laid.role_bytes("parameter"), laid.role_bytes("state"), laid.role_bytes("input")) == (
        4 * count,
        8 * count,
        4 * 50_000 + 4 * 3,
    )
    row = 4 * 60_000  # y, and its gradient, which ends up in the same place
    # the weight's gradient beside that of y, which is as long as a row; the loss and the constant 1s take 64 bytes each
    assert 4 * count + row <= laid.arena <= 4 * count + row + 4 * 64
    assert laid.total == laid.arena + 12 * count + 4 * 50_000 + 12
    assert_apart(laid)


def test_a_llama_of_three_thousand_million_parameters() -> None:
    vocab, width, layers, ff, kv = 32000, 3072, 28, 8192, 1024
    model = llama(Size(vocab=vocab, width=width, layers=layers, heads=24, kv_heads=8, ff=ff, ctx=16, batch=1))
    laid = plan(training(model, remat="block"))
    block = 2 * width * width + 2 * width * kv + 3 * width * ff + 2 * width
    count = 2 * vocab * width + layers * block + width
    assert count > 2.9e9
    assert laid.role_bytes("parameter") == 4 * count
    assert laid.role_bytes("state") == 8 * count + 4 * model.table.size
    assert laid.arena > 4 * vocab * width  # a gradient of the largest weight, streamed
    assert laid.arena < 2.5 * 4 * vocab * width
    assert_apart(laid)


def test_streamed_training_takes_12_bytes_a_parameter() -> None:
    model = llama(SMALL)
    laid = plan(training(model))
    count = numbers(model)
    assert laid.role_bytes("parameter") == 4 * count
    assert laid.role_bytes("state") == 8 * count + model.table.nbytes  # exactly two floats, and the table
    assert laid.total == 12 * count + model.table.nbytes + laid.role_bytes("input") + laid.arena
    assert not laid.pinned


def test_training_with_kept_gradients_takes_16_bytes_a_parameter() -> None:
    model = llama(SMALL)
    kept = hold_gradients(differentiate(model.loss, model.trained))
    first = plan([kept.loss, *kept.first], pinned=kept.first)
    more = plan([kept.loss, *kept.more])
    last = plan(update_step(kept, AdamW(), clip=1.0)[2])
    count = numbers(model)
    assert first.pinned_bytes == 4 * count
    assert first.role_bytes("state") == model.table.nbytes
    assert more.role_bytes("state") == 4 * count + model.table.nbytes
    assert last.role_bytes("state") == 12 * count
    assert {*last.leaves("state")} >= {*kept.memory}
    assert last.arena <= 64 * (len(model.trained) + 4)  # nothing of a weight's size: no hidden copy
    # the gradients' own memory takes nothing more in the arena than streaming them does
    assert max(first.arena, more.arena) <= plan(training(model)).arena + max(
        rounded(w.nbytes) for w in model.trained
    )


def test_a_program_takes_what_its_plan_says() -> None:
    model = llama(SMALL)
    program = Program.build(training(model), model.random(), kernels="reference")
    program()
    assert program.arenas[0].nbytes == program.plan.arena
    assert (
        sum(array.nbytes for leaf, array in program.owned.items() if leaf.node is None)
        == program.plan.total - program.plan.arena
    )


# ---- the report -----------------------------------------------------------


def test_the_report() -> None:
    model = llama(SMALL)
    laid = plan(training(model))
    text = laid.report()
    for role in ("parameter", "state", "input"):
        assert f"{laid.role_bytes(role):,} bytes" in text
    assert f"{laid.arena:,} bytes" in text
    assert f"{laid.total:,} bytes" in text
    assert f"{laid.without_reuse:,} bytes" in text
    assert f"{1 - laid.arena / laid.without_reuse:.0%} saved" in text
    assert laid.peak_at is not None and repr(laid.peak_at) in text
    assert len(laid.report(max_lines=3).splitlines()) == len(text.splitlines()) - 5


def test_what_lives_at_the_peak() -> None:
    laid = plan(training(llama(SMALL)))
    place = laid.nodes.index(laid.peak_at)  # type: ignore[arg-type]
    lives = lives_of(laid)
    there = {repr(t): t.nbytes for t, (made, read) in lives.items() if made <= place <= read}
    listed = laid.alive_at_peak
    assert [size for _, size in listed] == sorted((size for _, size in listed), reverse=True)
    assert {name for name, _ in listed} <= set(there)
    assert sum(rounded(size) for _, size in listed) <= laid.arena
    end = max(
        laid.offsets[t] + rounded(t.nbytes) for t, (made, read) in lives.items() if made <= place <= read
    )
    assert end == laid.arena
