"""What lies below the first adapter is not differentiated, and nothing of it is kept for later."""

import pytest

from llamatrain.graph.node_roles import find_roles
from llamatrain.graph.tensor import Node, collect_nodes
from llamatrain.optim.methods.adamw import AdamW
from llamatrain.train.graphs import StepGraph, StepGraphs, StepSpec
from tests.helpers.small_models import small
from tests.train.test_sparse_weights import BATCH, LENGTH, LINEAR, adapted


def graphs_of(layers: int, names: list[str], **more: object) -> StepGraphs:
    h = small(layers=layers, tied=False)
    weights, trained = adapted(h, names)
    setting = StepSpec(
        h=h,
        weights=weights,
        trainable=trained,
        batch=BATCH,
        rope_length=LENGTH,
        precision="f32",
        threads=1,
        optimizer=AdamW(),
    )
    return StepGraphs(setting, **more)  # type: ignore[arg-type]


def by_purpose(graph: StepGraph, purpose: str) -> list[Node]:
    parts = find_roles(graph.outputs)
    return [node for node in collect_nodes(graph.outputs) if parts[node] == purpose]


def weights_read(nodes: list[Node]) -> set[str]:
    return {source.name for node in nodes for source in node.sources if source.name.startswith("blk.")}


def all_of(*layers: int) -> list[str]:
    return [f"blk.{layer}.{name}.weight" for layer in layers for name in LINEAR]


@pytest.mark.parametrize("remat", ["none", "light", "block", "optimal"])
def test_blocks_below_the_first_adapter_run_forward_only(remat: str) -> None:
    graph = graphs_of(5, all_of(3, 4), policy=remat).grad_graph(LENGTH, True)
    for purpose in ("backward", "again"):
        read = weights_read(by_purpose(graph, purpose))
        assert not [name for name in read if name.startswith(("blk.0.", "blk.1.", "blk.2."))]
    assert {name[:6] for name in weights_read(by_purpose(graph, "backward"))} == {"blk.3.", "blk.4."}


def test_nothing_of_them_is_kept() -> None:
    few, many = (
        graphs.plan(graphs.grad_graph(LENGTH, True)).arena
        for graphs in (graphs_of(n, all_of(n - 1)) for n in (2, 9))
    )
    assert many == few
    both = graphs_of(9, all_of(*range(9)))
    assert both.plan(both.grad_graph(LENGTH, True)).arena > 2 * many


def test_within_the_first_block_with_one_nothing_is_before_it() -> None:
    """An adapter of the feed-forward's end: no gradient of its block's attention, nor of what it reads."""
    graph = graphs_of(1, ["blk.0.ffn_down.weight"]).grad_graph(LENGTH, True)
    backward = by_purpose(graph, "backward")
    assert weights_read(backward) == {"blk.0.ffn_down.weight.lora_b"}
    assert {node.op.name for node in backward} <= {
        "out_prod",
        "matmul_nn",
        "scale",
        "linear_cross_entropy_back",
        "rms_norm_back",
    }


def test_no_gradient_of_an_input_that_nobody_trains() -> None:
    """Of the first block's projections only their adapters', not of what they read."""
    graph = graphs_of(1, all_of(0)).grad_graph(LENGTH, True)
    backward = by_purpose(graph, "backward")
    for name in ("attn_q", "attn_k", "attn_v"):
        assert f"blk.0.{name}.weight" not in weights_read(backward)
    norms = [node for node in backward if node.op.name == "rms_norm_back"]
    assert len(norms) == 2, "of the feed-forward's norm and the output's, and not of the attention's"
