"""Tokens without a weight are left out of the head and of the last block's end: the same loss and gradients come of it."""

import numpy as np
import pytest

from llamatrain.data.batches import Batch, StepTotals
from llamatrain.errors import GraphError
from llamatrain.graph import ops as O
from llamatrain.graph.dynamic_axis import node_sizes, resize_node, round_up
from llamatrain.graph.tensor import DynamicDim, parameter, placeholder, state
from llamatrain.model import transformer
from llamatrain.model.distill import PREFIX, Teacher
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.lora import Delta, Weights
from llamatrain.optim.methods.adamw import AdamW
from llamatrain.train.graphs import StepGraphs, StepSpec
from llamatrain.train.programs import TrainPrograms
from tests.helpers.small_models import small, weights

BATCH, LENGTH = 4, 96
LINEAR = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def batch_of(share: float, seed: int = 0) -> Batch:
    random, shape = np.random.default_rng(seed), (BATCH, LENGTH)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), shape)
    starts = positions // 32 * 32
    return Batch(
        tokens=random.integers(0, 258, shape, np.int32),
        targets=random.integers(0, 258, shape, np.int32),
        weights=np.where(random.random(shape) < share, random.uniform(0.5, 2, shape), 0).astype(np.float32),
        positions=positions - starts,
        starts=starts.astype(np.int32),
        size=BATCH * LENGTH,
    )


def adapted(h: Hyperparameters, names: list[str], rank: int = 4) -> tuple[Weights, dict[str, parameter]]:
    """The model with an adapter on each of these, which alone is trained."""
    deltas, trained = {}, {}
    for name in names:
        out, width = h.shapes[name]
        a, b = (
            parameter(f"{name}.lora_{half}", shape)
            for half, shape in (("a", (rank, width)), ("b", (out, rank)))
        )
        deltas[name] = (Delta(a=a, b=b, scale=0.5),)
        trained |= {each.name: each for each in (a, b)}
    return Weights({name: state(name, shape) for name, shape in h.shapes.items()}, deltas), trained


def programs_of(h: Hyperparameters, names: list[str] | None, **more: object) -> TrainPrograms:
    """Of all weights, or of adapters; their values are the same each time."""
    model = transformer.trainable_weights(h)
    way, trained = (model, dict(model.tensors)) if names is None else adapted(h, names)
    setting = StepSpec(
        h=h,
        weights=way,
        trainable=trained,
        batch=BATCH,
        rope_length=LENGTH,
        threads=2,
        optimizer=AdamW(),
        **{"precision": "f32", **more},  # type: ignore[arg-type]
    )
    graphs = StepGraphs(setting)
    arena = max(graphs.plan(graph).arena for graph in graphs.build_all([LENGTH], True, True)[0])
    arrays = weights(h)
    told = (
        {f"{PREFIX}{name}": array for name, array in weights(setting.teacher.h, 5).items()}
        if setting.teacher
        else {}
    )
    made = TrainPrograms(graphs, arena, told if names is None else arrays | told)
    random = np.random.default_rng(3)
    for name, part in made.weights.parts.items():
        part[...] = arrays[name] if names is None else 0.1 * random.standard_normal(part.shape)
    return made


def gradients_of(made: TrainPrograms, batch: Batch) -> tuple[float, dict[str, np.ndarray]]:
    total = float(batch.weights.sum(dtype=np.float64))
    loss = made.compute_gradients(batch, StepTotals(total), 0)
    assert made.grads
    return loss, {name: part.copy() for name, part in made.grads.parts.items()}


EVERY = [f"blk.{layer}.{name}.weight" for layer in range(2) for name in LINEAR]


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize(
    "names", [None, EVERY, [*EVERY, "output.weight"]], ids=["all", "adapters", "and the output's"]
)
@pytest.mark.parametrize("share", [0.02, 0.4, 0.97])
def test_loss_and_gradients_are_the_same(names: list[str] | None, share: float, kernels: str) -> None:
    h, batch = small(tied=False), batch_of(share)
    plain, sparse = (
        gradients_of(programs_of(h, names, has_untrained_tokens=each, kernels=kernels), batch)
        for each in (False, True)
    )
    assert sparse[0] == pytest.approx(plain[0], rel=1e-6)
    assert plain[1].keys() == sparse[1].keys()
    for name, expected in plain[1].items():
        scale = np.abs(expected).max()
        assert scale > 0, name
        np.testing.assert_allclose(sparse[1][name], expected, atol=1e-5 * scale, err_msg=name)


@pytest.mark.parametrize("vocab", [258, 300], ids=["of the same words", "of more words"])
def test_beside_a_teacher(vocab: int) -> None:
    h, batch = small(tied=False), batch_of(0.3)
    teacher = Teacher(h=small(vocab=vocab, embd=32, heads=2, tied=True), share=0.6, half=False)
    plain, sparse = (
        gradients_of(programs_of(h, EVERY, has_untrained_tokens=each, teacher=teacher), batch)
        for each in (False, True)
    )
    assert sparse[0] == pytest.approx(plain[0], rel=1e-6)
    for name, expected in plain[1].items():
        np.testing.assert_allclose(
            sparse[1][name], expected, atol=1e-5 * np.abs(expected).max(), err_msg=name
        )


def test_batches_of_other_shares_follow_each_other_in_one_program() -> None:
    """What an earlier one left behind counts for nothing."""
    h = small(tied=True)
    made = programs_of(h, None, has_untrained_tokens=True)
    for share, seed in ((1.0, 1), (0.03, 2), (0.5, 3), (0.03, 2)):
        batch = batch_of(share, seed)
        fresh = gradients_of(programs_of(h, None, has_untrained_tokens=True), batch)
        loss, found = gradients_of(made, batch)
        assert loss == fresh[0]
        assert all(np.array_equal(found[name], fresh[1][name]) for name in found)


def test_a_batch_without_any_weight_has_no_loss() -> None:
    made = programs_of(small(tied=False), None, has_untrained_tokens=True)
    batch = batch_of(0.0)
    made.compute_gradients(batch_of(0.9), StepTotals(), 0)
    assert (
        made.compute_gradients(batch, StepTotals(), 0) == 0
        and made.grads is not None
        and not made.grads.vector.any()
    )


def test_in_bf16_they_agree_as_far_as_it_reaches() -> None:
    h, batch = small(tied=False), batch_of(0.3)
    plain, sparse = (
        gradients_of(programs_of(h, EVERY, has_untrained_tokens=each, precision="bf16"), batch)
        for each in (False, True)
    )
    assert sparse[0] == pytest.approx(plain[0], rel=1e-3)
    for name, expected in plain[1].items():
        np.testing.assert_allclose(
            sparse[1][name], expected, atol=0.03 * np.abs(expected).max(), err_msg=name
        )


def test_judging_leaves_them_out_too() -> None:
    h = small(tied=False)
    plain, sparse = (programs_of(h, None, has_untrained_tokens=each) for each in (False, True))
    for share in (0.1, 0.8):
        batch = batch_of(share)
        (loss, right), (other, found) = plain.eval_loss(batch), sparse.eval_loss(batch)
        assert other == pytest.approx(loss, rel=1e-6) and found == right


def test_the_head_s_work_follows_the_count() -> None:
    """Counted in its products: a tenth of the tokens makes no more than two sixteenths of the work."""
    made = programs_of(small(tied=False), None, has_untrained_tokens=True)
    batch = batch_of(0.1)
    made.compute_gradients(batch, StepTotals(), 0)
    program = made.get_program("first", LENGTH, lambda: made.graphs.grad_graph(LENGTH, True)).program
    heads = [
        stretch
        for stretch in program.segments
        for node, _ in stretch.steps
        if "cross_entropy" in node.op.name
    ]
    assert [stretch.length for stretch in heads] == [
        round_up(program.dynamic_dim, np.count_nonzero(batch.weights))
    ]
    assert heads[0].length <= 0.2 * BATCH * LENGTH


# ---- axes that vary ---------------------------------------------------------


def test_what_computes_with_a_length_that_varies_is_refused() -> None:
    x = placeholder("x", (DynamicDim(64, 16), 8))
    y = O.reshape(x, shape=(8, 64))
    with pytest.raises(GraphError):
        resize_node(y.node, 16)
    assert [each.sources[0].shape for each in node_sizes(O.silu(x).node)] == [
        (64, 8),
        (16, 8),
        (32, 8),
        (48, 8),
    ]


def test_two_lengths_that_vary_are_refused() -> None:
    x, y = placeholder("x", (DynamicDim(64, 16), 8)), placeholder("y", (DynamicDim(32, 16), 8))
    with pytest.raises(GraphError, match="one axis may be dynamic"):
        list(node_sizes(O.matmul(x, y).node))
