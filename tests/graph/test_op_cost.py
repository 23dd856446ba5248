"""What nodes have to do, and what part of a training they are."""

import pytest

from llamatrain.graph import ops as O
from llamatrain.graph.autodiff import value_and_gradients
from llamatrain.graph.node_roles import find_roles
from llamatrain.graph.op_cost import estimate_cost
from llamatrain.graph.remat import recompute
from llamatrain.graph.tensor import I32, Tensor, collect_nodes, parameter, placeholder, quantized, state
from tests.helpers.op_cases import CASES, Case


def flops(tensor: Tensor) -> int:
    assert tensor.node
    return estimate_cost(tensor.node).flops


def moved(tensor: Tensor) -> int:
    assert tensor.node
    return estimate_cost(tensor.node).bytes_moved


def test_the_three_products_of_a_layer_do_the_same() -> None:
    x, w, dy = placeholder("x", (2, 7, 5)), parameter("w", (3, 5)), placeholder("dy", (2, 7, 3))
    made = [O.matmul(x, w), O.matmul_nn(dy, w), O.out_prod(dy, x)]
    assert [flops(each) for each in made] == [2 * 2 * 7 * 5 * 3] * 3
    assert moved(made[0]) == 4 * (70 + 15 + 42)


def test_a_quantised_weight_counts_as_the_bytes_that_it_has() -> None:
    y = O.matmul(placeholder("x", (1, 64)), state("w", (8, 64), quantized("Q4_0")))
    assert flops(y) == 2 * 64 * 8 and moved(y) == 4 * 64 + 8 * 2 * 18 + 4 * 8


def test_a_head_does_a_product_for_each_of_its_results() -> None:
    x, w, ids, weights = (
        placeholder("x", (4, 6)),
        parameter("w", (9, 6)),
        placeholder("t", (4,), I32),
        placeholder("n", (4,)),
    )
    assert flops(O.linear_cross_entropy(x, w, ids, weights)) == 2 * 4 * 6 * 9
    one = placeholder("d", ())
    for dx, dw in ((True, True), (True, False)):
        assert (
            flops(O.linear_cross_entropy_back(one, x, w, ids, weights, dx=dx, dw=dw)[0])
            == (1 + dx + dw) * 2 * 4 * 6 * 9
        )


def test_attention_does_what_a_causal_mask_leaves() -> None:
    q, k, v = (placeholder(name, (2, 3, heads, 8)) for name, heads in (("q", 4), ("k", 2), ("v", 2)))
    starts = placeholder("s", (2, 3), I32)
    out, lse = O.flash_attn(q, k, v, starts, scale=1.0)
    seen = 2 * 4 * (1 + 2 + 3)
    assert flops(out) == 2 * 2 * 8 * seen
    assert flops(O.flash_attn_back(q, q, k, v, out, lse, starts, scale=1.0)[0]) == 5 * 2 * 8 * seen
    assert (
        flops(O.flash_attn(q, k, v, starts, starts, scale=1.0)[0]) == 2 * 2 * 8 * 2 * 4 * 9
    )  # at most: lasts say it


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (3, 9), (1, 6)])
@pytest.mark.parametrize("window", [1, 2, 5, 7, 50])
def test_attention_with_a_window_does_what_that_leaves(queries: int, keys: int, window: int) -> None:
    q, k, starts = (
        placeholder("q", (2, queries, 4, 8)),
        placeholder("k", (2, keys, 2, 8)),
        placeholder("s", (2, queries), I32),
    )
    out, lse = O.flash_attn(q, k, k, starts, scale=1.0, window=window)
    seen = 2 * 4 * sum(min(window, keys - queries + 1 + query) for query in range(queries))
    assert flops(out) == 2 * 2 * 8 * seen
    assert (
        flops(O.flash_attn_back(q, q, k, k, out, lse, starts, scale=1.0, window=window)[0])
        == 5 * 2 * 8 * seen
    )
    most = 2 * 4 * queries * min(keys, window)
    assert flops(O.flash_attn(q, k, k, starts, starts, scale=1.0, window=window)[0]) == 2 * 2 * 8 * most


def test_of_a_table_only_the_rows_that_are_taken_move() -> None:
    table, ids = parameter("w", (1000, 4)), placeholder("i", (3,), I32)
    assert moved(O.get_rows(table, ids)) == 12 + 2 * 48
    cache, rows = state("c", (1000, 4)), placeholder("r", (3, 4))
    assert moved(O.set_rows(cache, rows, ids, into=True)) == 12 + 2 * 48
    assert moved(O.acc(cache, rows, slices=((0, 3, 1), (0, 4, 1)), into=True)) == 3 * 48
    assert moved(O.fill(shape=(5,), value=0.0)) == 20


@pytest.mark.parametrize("name", CASES)
def test_every_op_moves_something(name: str) -> None:
    made = CASES[name][0](Case())
    for node in collect_nodes(made if isinstance(made, tuple) else [made]):
        assert (
            node.op.layout
            or not any(output.size for output in node.outputs)
            or estimate_cost(node).bytes_moved > 0
        )


# ---- parts -----------------------------------------------------------------


def test_parts_of_a_step() -> None:
    x, w = placeholder("x", (4, 4)), parameter("w", (4, 4))
    hidden = O.silu(O.matmul(x, w))
    loss, (grad,) = value_and_gradients(O.sum(O.matmul(O.silu(hidden), w)), [w])
    loss, grad = recompute([loss, grad], [loss], [hidden])
    m, v, told, one = state("m", (4, 4)), state("v", (4, 4)), placeholder("s", (3,)), placeholder("f", ())
    stepped = O.opt_step_adamw(w, m, v, grad, told, one, beta1=0.9, beta2=0.9, eps=1e-8, decay=0.0)
    outputs = [loss, *stepped, O.clip_factor(O.sum_sqr(grad), limit=1.0)[1]]
    found = {(node.op.name, part) for node, part in find_roles(outputs).items()}
    assert {("silu", "forward"), ("silu", "again"), ("silu_back", "backward"), ("matmul", "forward")} <= found
    assert {("opt_step_adamw", "optimizer"), ("sum_sqr", "optimizer"), ("clip_factor", "optimizer")} <= found
    assert ("silu", "backward") not in found and ("sum", "optimizer") not in found


def test_parts_of_the_step_alone() -> None:
    w, g, m, told = parameter("w", (4,)), state("g", (4,)), state("m", (4,)), placeholder("s", (3,))
    factor, norm = O.clip_factor(O.sum_sqr(g), limit=1.0)
    rate = O.mul(told, state("faster", (3,)))
    stepped = O.opt_step_sgd(w, m, g, rate, factor, momentum=0.9, decay=0.0)
    assert set(find_roles([norm, *stepped]).values()) == {"optimizer"}
