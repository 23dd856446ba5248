"""Recomputation changes when values live, and nothing else: not one bit of a gradient."""

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamatrain.engine.plan import plan
from llamatrain.engine.program import Program
from llamatrain.errors import GraphError
from llamatrain.graph.autodiff import value_and_gradients
from llamatrain.graph.ops import matmul, mul, sqr, sum, swiglu, swiglu_halves
from llamatrain.graph.remat import choose_borders, recompute
from llamatrain.graph.remat_policy import format_policy, is_policy, parse_policy
from llamatrain.graph.tensor import Tensor, collect_nodes, parameter, placeholder
from llamatrain.optim.methods.adamw import AdamW
from llamatrain.optim.update_graph import differentiate, streamed_update
from tests.helpers.random_models import TINY, Size, llama

SIZES = {
    "plain": replace(TINY, layers=3, ctx=8, batch=2),
    "grouped": Size(vocab=11, width=12, layers=4, heads=6, kv_heads=2, ff=20, ctx=5, batch=1, fused=False),
    "lora": Size(vocab=8, width=16, layers=2, heads=4, kv_heads=4, ff=24, ctx=6, batch=2, lora=2),
    "phi3": replace(
        TINY, layers=3, ctx=8, batch=2, arch="phi3"
    ),  # products of several, and columns cut from them
    "gemma2": replace(TINY, layers=3, ctx=8, batch=2, arch="gemma2"),  # caps, windows, gelu's gate
}
POLICIES = (
    "light",
    "block",
    "optimal",
    0,
    1,
    2,
    "wide:1",
    "products:9",
    "segment:2",
    "segment:2,wide:1",
    "none:1,products:1",
)


def bits(outputs: list[Tensor], arrays: dict[Tensor, np.ndarray]) -> list[bytes]:
    program = Program.build(outputs, arrays, kernels="reference")
    program()
    return [program.read(output).tobytes() for output in outputs]


@cache
def made(name: str):
    model = llama(SIZES[name])
    arrays = model.random()
    rng = np.random.default_rng(3)
    for leaf in {
        source for node in collect_nodes([model.loss]) for source in node.sources if source.role == "state"
    } - set(arrays):
        arrays[leaf] = (rng.standard_normal(leaf.shape) * 0.2).astype(np.float32)
    return model, arrays


def trained(name: str, precision: str, remat: str | int) -> list[Tensor]:
    model, _ = made(name)
    found = differentiate(
        model.loss, model.trained, precision=precision, borders=model.block_inputs, remat=remat
    )
    return [found.loss, *found.grads.values()]


@cache
def without(name: str, precision: str) -> list[bytes]:
    return bits(trained(name, precision, "none"), made(name)[1])


@pytest.mark.parametrize("remat", POLICIES)
@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("name", SIZES)
def test_loss_and_gradients_have_the_same_bits(name: str, precision: str, remat: str | int) -> None:
    outputs = trained(name, precision, remat)
    if remat not in (0, "none:1,products:1"):
        assert len(collect_nodes(outputs)) > len(
            collect_nodes(trained(name, precision, "none"))
        )  # something is made again
    assert bits(outputs, made(name)[1]) == without(name, precision)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(list(SIZES)), st.randoms(use_true_random=False), st.booleans())
def test_whatever_is_kept_the_bits_are_the_same(name: str, rng: random.Random, limited: bool) -> None:
    model, arrays = made(name)
    value, grads = value_and_gradients(model.loss, model.trained)
    forward = [output for node in collect_nodes([model.loss]) for output in node.outputs]
    keep = [tensor for tensor in forward if rng.random() < 0.3]
    among = [tensor for tensor in forward if rng.random() < 0.5] if limited else None
    assert bits(recompute([value, *grads], [model.loss], keep, among), arrays) == without(name, "f32")


def test_a_segment_keeps_the_border_that_it_begins_with() -> None:
    """And what the ancestors' spacing does is a case of it."""
    model = llama(replace(SIZES["plain"], layers=9, fused=False))
    made = {
        remat: differentiate(model.loss, model.trained, borders=model.block_inputs, remat=remat)
        for remat in ("segment:3,segment:3,block:2", "optimal", "segment:5,block:1", "8")
    }
    nodes = {remat: len(collect_nodes([found.loss, *found.grads.values()])) for remat, found in made.items()}
    assert nodes["segment:3,segment:3,block:2"] == nodes["optimal"] > nodes["segment:5,block:1"] > nodes["8"]
    runs = read_by_products([made["segment:5,block:1"].loss, *made["segment:5,block:1"].grads.values()])
    assert [runs[f"blk.{layer}.attn_q.weight"] for layer in range(9)] == [3, 3, 3, 3, 2, 2, 1, 1, 1]


def test_attention_is_what_is_kept_last() -> None:
    """What is wide is made again before what is not."""
    counts = []
    for remat in ("light", "wide:3", "products:3", "block"):
        model = llama(replace(SIZES["plain"], layers=4))
        found = differentiate(model.loss, model.trained, borders=model.block_inputs, remat=remat)
        ops = Counter(node.op.name for node in collect_nodes([found.loss, *found.grads.values()]))
        counts.append((ops["matmul"], ops["flash_attn"]))
    products, attention = zip(*counts, strict=True)
    assert (
        attention == (4, 4, 4, 7)
        and products[1] - products[0] == 2 * 3
        and products[0] < products[1] < products[2]
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "wide",
        "wide:0",
        "wide:-1",
        "block:1,",
        "blocks:1",
        "1,2",
        "optimal:2",
        "\N{DIGIT ONE}\N{FULLWIDTH DIGIT ONE}",
    ],
)
def test_words_that_say_nothing_of_blocks(text: str) -> None:
    assert not is_policy(text)
    with pytest.raises(GraphError, match="unknown recomputation policy"):
        parse_policy(text, 4)


def test_words_for_blocks() -> None:
    assert parse_policy("segment:3,block:2", 9) == [("segment", 3), ("block", 2), ("light", 4)]
    assert parse_policy(3, 9) == parse_policy("3", 9) == [("block", 3), ("light", 6)] and parse_policy(
        "block", 2
    ) == [("block", 2)]
    assert parse_policy("block:5", 4) == [("block", 4)]
    for word in ("light", "3", "segment:3,segment:2,block:2", "block:1,wide:2", "none:2,light:1,wide:1"):
        assert format_policy(parse_policy(word, 9)) == word and is_policy(word)


def read_by_products(outputs: list[Tensor]) -> Counter[str]:
    """How often the forward product of each weight is run."""
    return Counter(
        node.sources[1].name
        for node in collect_nodes(outputs)
        if node.op.name == "matmul" and node.sources[1].name
    )


def test_only_what_a_gradient_reads_is_made_again() -> None:
    model = llama(replace(SIZES["plain"], fused=False))
    found = differentiate(model.loss, model.trained, borders=model.block_inputs, remat="block")
    runs = read_by_products([found.loss, *found.grads.values()])
    assert set(runs) == {weight.name for weight in model.trained if len(weight.shape) == 2} - {
        "token_embd.weight"
    }
    for name, count in runs.items():
        assert count <= 2, name
        if name in ("blk.0.ffn_down.weight", "blk.1.ffn_down.weight"):
            assert count == 1, name  # a block's last product goes only into the next border


def test_forward_results_are_not_made_again() -> None:
    model = llama(SIZES["plain"])
    _, grads = value_and_gradients(model.loss, model.trained[-1:])
    plain = collect_nodes([model.loss])
    outputs = recompute([model.loss, model.block_inputs[1], *grads], [model.loss], model.block_inputs)
    assert outputs[:2] == [model.loss, model.block_inputs[1]]
    assert collect_nodes(outputs[:1]) == plain


def test_what_the_gradients_do_not_need_is_not_made_again() -> None:
    """Gradients of the middle block's weights need its values and the last one's, which is never made again."""
    model = llama(replace(SIZES["plain"], fused=False))
    middle = [weight for weight in model.trained if weight.name.startswith("blk.1.")]
    found = differentiate(model.loss, middle, borders=model.block_inputs, remat="block")
    runs = read_by_products([found.loss, *found.grads.values()])
    assert all(count == 1 for name, count in runs.items() if name.startswith(("blk.0.", "blk.2.ffn_up")))
    assert runs["blk.1.ffn_gate.weight"] == 2


def test_kept_values_and_views_of_leaves_stay() -> None:
    x, w = placeholder("x", (3, 4)), parameter("w", (5, 4))
    y = matmul(x, w)
    value, grads = value_and_gradients(sum(sqr(y)), [w])
    assert len(collect_nodes(recompute([value, *grads], [value], [y]))) == len(collect_nodes([value, *grads]))
    assert (
        len(collect_nodes(recompute([value, *grads], [value], []))) == len(collect_nodes([value, *grads])) + 1
    )


LONG = Size(vocab=32000, width=512, layers=32, heads=8, kv_heads=8, ff=1376, ctx=512, batch=4)


@cache
def arena(remat: str | int, precision: str = "f32") -> int:
    model = llama(LONG)
    found = differentiate(
        model.loss, model.trained, precision=precision, borders=model.block_inputs, remat=remat
    )
    return plan(streamed_update(found, AdamW())[1]).arena


def test_32_layers_need_a_quarter_of_the_arena() -> None:
    assert arena("block") <= 0.25 * arena("none")


BORDER = LONG.batch * LONG.ctx * LONG.width * 4  # bytes


def test_fewer_borders_are_kept_where_they_are_made_again() -> None:
    """Of 32 of them 6 and 6: every sixth, and those that begin it all. The rest is some more of the block that is at work."""
    assert len(choose_borders([parameter(str(number), (1,)) for number in range(32)])) == 7
    assert arena("block") - arena("optimal") >= (32 - 2 * 6 - 1) * BORDER


def test_what_costs_least_memory_is_made_thrice_at_most() -> None:
    model = llama(replace(SIZES["plain"], layers=9, fused=False))
    found = differentiate(model.loss, model.trained, borders=model.block_inputs, remat="optimal")
    runs = read_by_products([found.loss, *found.grads.values()])
    assert max(runs.values()) == 3 and runs["blk.8.attn_q.weight"] == 1


def test_a_middle_way() -> None:
    """More blocks made again, less memory."""
    assert arena("none") > arena("light") >= arena(8) > arena(24) >= arena(32) * 0.99


@pytest.mark.parametrize("blocks", [1, 2, 3, 9, 10, 32, 48, 126])
def test_borders_are_as_far_apart_as_makes_them_fewest(blocks: int) -> None:
    """Of those that are kept, one goes with each segment whose gradients are there; beside them are those that are made again."""
    borders = [parameter(str(number), (1,)) for number in range(blocks)]
    places = [borders.index(border) for border in choose_borders(borders)]
    again = [kept + following - place for kept, (place, following) in enumerate(pairwise(places), 1)]
    assert places[0] == 0 and places[-1] == blocks - 1
    assert max(len(places), *again, 0) == min(
        -(-blocks // apart) + apart - 1 for apart in range(1, blocks + 1)
    )


@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize("gate", ["two", "halves"])
def test_a_gate_is_made_again_wherever_its_sources_lie(gate: str, precision: str) -> None:
    """Of one product as of two: what it reads is kept anyway."""
    x, border = placeholder("x", (6, 8)), sqr(placeholder("h", (6, 8)))
    made = [matmul(border, parameter(name, (16 if gate == "halves" else 8, 8))) for name in ("gate", "up")]
    down = parameter("down", (8, 8))
    y = matmul(swiglu_halves(made[0]) if gate == "halves" else swiglu(*made), down)
    loss = sum(mul(sqr(y), x))
    found = differentiate(
        loss, [down, made[0].node.sources[1]], precision=precision, borders=[border, y], remat="light"
    )
    gates = [
        node
        for node in collect_nodes([found.loss, *found.grads.values()])
        if node.op.name.startswith("swiglu")
    ]
    assert [node.op.name.endswith("_back") for node in gates].count(False) == 2


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(GraphError, match=r"'some'.*none, light, block, optimal"):
        trained("plain", "f32", "some")
    with pytest.raises(GraphError, match=r"f32 or bf16 .got 'f16'"):
        trained("plain", "f16", "none")


@pytest.mark.parametrize("precision", ["f32", "bf16"])
def test_light_recomputation_saves_memory_in_either_precision(precision: str) -> None:
    arenas = []
    for remat in ("none", "light", "block"):
        model = llama(
            Size(vocab=64, width=64, layers=6, heads=4, kv_heads=2, ff=160, ctx=64, batch=4, lora=4)
        )
        made = differentiate(
            model.loss, model.trained, precision=precision, borders=model.block_inputs, remat=remat
        )
        arenas.append(plan([made.loss, *made.grads.values()]).arena)
    assert arenas == sorted(arenas, reverse=True)
