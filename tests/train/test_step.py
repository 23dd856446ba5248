"""Training steps: gradients that add up over micro-batches, clipping, and optimizers against formula and torch."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from llamatrain.engine.program import Program
from llamatrain.graph import ops as O
from llamatrain.graph.tensor import Tensor, parameter, placeholder
from llamatrain.optim.methods.adamw import AdamW
from llamatrain.optim.methods.lbfgs import LbfgsState
from llamatrain.optim.methods.sgd import SGD
from llamatrain.optim.update_graph import (
    HeldGradients,
    differentiate,
    hold_gradients,
    streamed_update,
    update_step,
)
from tests.helpers.random_models import TINY, Llama, llama

Arrays = dict[Tensor, np.ndarray]
SIZE = replace(TINY, layers=2, kv_heads=2, ctx=8)


def reference(outputs: list[Tensor], arrays: Arrays | None = None) -> Program:
    return Program.build(outputs, arrays or {}, kernels="reference")


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# ---- gradients that add up -------------------------------------------------


def fitted(model: Llama, arrays: dict[str, np.ndarray], rows: slice) -> Arrays:
    """A model's arrays: weights and inputs by name, of the batch these rows."""
    own = {leaf: array for leaf, array in model.random().items() if leaf not in model.trained}
    inputs = {model.inputs[name]: name for name in ("tokens", "positions", "starts")}
    flat = {model.targets: "targets", model.weights: "weights"}
    own |= {leaf: arrays[name][rows] for leaf, name in inputs.items()}
    own |= {leaf: arrays[name].reshape(-1, SIZE.ctx)[rows].reshape(-1) for leaf, name in flat.items()}
    return own | {weight: arrays[weight.name].copy() for weight in model.trained}


def by_name(size=SIZE) -> dict[str, np.ndarray]:
    return {leaf.name: array for leaf, array in llama(size).random().items()}


def accumulated(micro: int) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients of the batch of 8, in micro-batches of this many rows."""
    arrays, model = by_name(), llama(replace(SIZE, batch=micro))
    kept = hold_gradients(differentiate(model.loss, model.trained))
    blocks = {block: np.full(block.shape, np.nan, np.float32) for block in kept.memory}
    memory = {
        leaf: np.ascontiguousarray(array) for leaf, array in fitted(model, arrays, slice(0, micro)).items()
    }
    first = reference([kept.loss, *kept.first], memory | dict(zip(kept.first, blocks.values(), strict=True)))
    more, loss = reference([kept.loss, *kept.more], memory | blocks), 0.0
    for start in range(0, SIZE.batch, micro):
        for leaf, array in fitted(model, arrays, slice(start, start + micro)).items():
            memory[leaf][...] = array
        program = more if start else first
        program()
        loss += float(program.read(kept.loss))
    return loss, {weight.name: blocks[block] for weight, (block,) in kept.blocks.items()}


def test_micro_batches_add_up_to_the_batch() -> None:
    whole_loss, whole = accumulated(8)
    for micro in (1, 4):
        loss, grads = accumulated(micro)
        assert loss == pytest.approx(whole_loss, rel=1e-5)
        for name, grad in grads.items():
            np.testing.assert_allclose(grad, whole[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_one_gradient_for_two_parameters_is_kept_twice() -> None:
    a, b = parameter("a", (3,)), parameter("b", (3,))
    made = differentiate(O.sum_sqr(O.add(a, b)), [a, b])
    kept = hold_gradients(made)
    blocks = {block: np.zeros(3, np.float32) for block in kept.memory}
    memory = {a: np.arange(3, dtype=np.float32), b: np.ones(3, np.float32)}
    reference([kept.loss, *kept.first], memory | dict(zip(kept.first, blocks.values(), strict=True)))()
    for times in (1, 2, 3):
        for block in blocks.values():
            np.testing.assert_array_equal(block, 2 * times * np.arange(1, 4))
        reference([kept.loss, *kept.more], memory | blocks)()


# ---- steps -----------------------------------------------------------------


def problem() -> tuple[HeldGradients, list[Tensor], Arrays]:
    a, b, bias = parameter("a", (5, 3)), parameter("b", (4, 3)), parameter("bias", (4,))
    c = placeholder("c", (5, 4))
    error = O.sub(c, O.add(O.matmul(a, b), bias))
    weights = [a, b, bias]
    arrays = {
        a: random(5, 3, seed=1),
        b: random(4, 3, seed=2),
        bias: random(4, seed=3),
        c: random(5, 4, seed=4),
    }
    return hold_gradients(differentiate(O.sum_sqr(error), weights)), weights, arrays


def kept_steps(
    optimizer: AdamW | SGD, schedules: list[np.ndarray], clip: float = 0.0
) -> tuple[list[np.ndarray], list[float]]:
    """The weights after steps with kept gradients, and the norms."""
    kept, weights, arrays = problem()
    blocks = {block: np.zeros(block.shape, np.float32) for block in kept.memory}
    inputs, norm, outputs = update_step(kept, optimizer, clip)
    first = reference([kept.loss, *kept.first], arrays | dict(zip(kept.first, blocks.values(), strict=True)))
    last = reference(outputs, {**{weight: arrays[weight] for weight in weights}, **blocks})
    norms = []
    for schedule in schedules:
        last.write(inputs.schedule, schedule)
        first()
        last()
        norms.append(float(last.read(norm)))
    return [arrays[weight] for weight in weights], norms


def streamed_steps(optimizer: AdamW | SGD, schedules: list[np.ndarray]) -> list[np.ndarray]:
    kept, weights, arrays = problem()
    inputs, outputs = streamed_update(differentiate(kept.loss, weights), optimizer)
    program = reference(outputs, arrays)
    for schedule in schedules:
        program.write(inputs.schedule, schedule)
        program()
    return [arrays[weight] for weight in weights]


RATES = [0.01 * (step % 4 + 1) for step in range(10)]
ADAMW, MOMENTUM = AdamW(beta2=0.98, weight_decay=0.3), SGD(momentum=0.8, weight_decay=0.2)
SCHEDULES = [ADAMW.schedule(step, rate) for step, rate in enumerate(RATES, 1)]
PLAIN = SGD(momentum=0.0, weight_decay=0.0)


@pytest.mark.parametrize("optimizer", [ADAMW, PLAIN, MOMENTUM])
def test_streamed_and_kept_gradients_give_the_same_bits(optimizer: AdamW | SGD) -> None:
    steps = [schedule * np.float32([0.2, 1, 1]) for schedule in SCHEDULES]
    for kept, streamed in zip(kept_steps(optimizer, steps)[0], streamed_steps(optimizer, steps), strict=True):
        assert np.isfinite(kept).all()
        assert kept.tobytes() == streamed.tobytes()


def test_clipping_by_formula() -> None:
    _, _, start = problem()
    before = list(start.values())[:3]
    rate = [np.array([1.0, 1.0, 1.0], np.float32)]
    free, (norm,) = kept_steps(PLAIN, rate)
    grads = [old - new for old, new in zip(before, free, strict=True)]
    assert norm == pytest.approx(
        np.sqrt(sum(np.sum(np.square(grad, dtype=np.float64)) for grad in grads)), rel=1e-5
    )
    for limit, factor in ((norm / 4, 0.25), (norm * 2, 1.0), (0.0, 1.0)):
        clipped, (same,) = kept_steps(PLAIN, rate, limit)
        assert same == norm  # as it was before
        for old, new, grad in zip(before, clipped, grads, strict=True):
            np.testing.assert_allclose(old - new, factor * grad, rtol=1e-4, atol=1e-5)


def test_decay_is_for_two_or_more_dimensions() -> None:
    """With a rate of 0.5, a decay of 1 and no gradient to speak of, half is left."""
    for optimizer in (AdamW(weight_decay=1.0), SGD(weight_decay=1.0)):
        made = [
            parameter(name, shape)
            for name, shape in (("three", (2, 1, 2)), ("two", (3, 2)), ("one", (3,)), ("none", ()))
        ]
        sums = [O.scale(O.sum(weight), by=1e-30) for weight in made]
        loss = O.add(O.add(sums[0], sums[1]), O.add(sums[2], sums[3]))
        inputs, outputs = streamed_update(differentiate(loss, made), optimizer)
        arrays = {weight: np.ones(weight.shape, np.float32) for weight in made}
        program = reference(outputs, arrays)
        program.write(inputs.schedule, [0.5, 1, 1])
        program()
        assert [float(arrays[weight].max()) for weight in made] == pytest.approx([0.5, 0.5, 1, 1])


def torch_steps(
    make: Callable, clip: float = 0.0, decoupled: float = 0.0
) -> tuple[list[np.ndarray], list[float]]:
    torch = pytest.importorskip("torch")
    _, weights, arrays = problem()
    a, b, bias = (torch.nn.Parameter(torch.from_numpy(arrays[weight])) for weight in weights)
    c = torch.from_numpy(list(arrays.values())[3])
    optimizer, norms = make(torch, [a, b], [bias]), []
    for rate in RATES:
        for group in optimizer.param_groups:
            group["lr"] = rate if not isinstance(optimizer, torch.optim.SGD) else rate / 5
        optimizer.zero_grad()
        (c - (a @ b.T + bias)).square().sum().backward()
        if clip:
            norms.append(float(torch.nn.utils.clip_grad_norm_([a, b, bias], clip)))
        with torch.no_grad():
            for weight in (a, b):
                weight *= 1 - decoupled * optimizer.param_groups[0]["lr"]
        optimizer.step()
    return [each.detach().numpy() for each in (a, b, bias)], norms


def adamw(torch, decaying: list, others: list):
    groups = [{"params": decaying, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.98), eps=1e-8)


@pytest.mark.reference
@pytest.mark.parametrize("clip", [0.0, 2.0])
def test_ten_adamw_steps_are_torchs(clip: float) -> None:
    ours, norms = kept_steps(ADAMW, SCHEDULES, clip)
    theirs, their_norms = torch_steps(adamw, clip)
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)
    if clip:
        np.testing.assert_allclose(norms, their_norms, rtol=1e-5)


@pytest.mark.reference
@pytest.mark.parametrize(("momentum", "decay", "clip"), [(0.0, 0.0, 0.0), (0.8, 0.0, 3.0), (0.8, 0.2, 0.0)])
def test_ten_sgd_steps_are_torchs(momentum: float, decay: float, clip: float) -> None:
    steps = [schedule * np.float32([0.2, 1, 1]) for schedule in SCHEDULES]
    ours, _ = kept_steps(SGD(momentum=momentum, weight_decay=decay), steps, clip)
    theirs, _ = torch_steps(
        lambda torch, two, one: torch.optim.SGD([*two, *one], lr=1.0, momentum=momentum), clip, decay
    )
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)


# ---- minimising Σ (c - a·b)² -----------------------------------------------


def product() -> tuple[Tensor, list[Tensor], Arrays]:
    a, b, c = parameter("a", (6, 3)), parameter("b", (5, 3)), placeholder("c", (6, 5))
    loss = O.sum_sqr(O.sub(c, O.matmul(a, b)))
    can_be = random(6, 3, seed=4) @ random(3, 5, seed=5)  # of rank 3, so that 0 can be reached
    return loss, [a, b], {a: random(6, 3, seed=1), b: random(5, 3, seed=2), c: can_be}


@pytest.mark.parametrize(
    ("optimizer", "rate", "steps"),
    [(AdamW(weight_decay=0.0), 0.1, 400), (SGD(momentum=0.9, weight_decay=0.0), 0.004, 600)],
    ids=["adamw", "sgd"],
)
def test_a_product_is_found_step_by_step(optimizer: AdamW | SGD, rate: float, steps: int) -> None:
    loss, weights, arrays = product()
    made = differentiate(loss, weights)
    inputs, outputs = streamed_update(made, optimizer)
    program, losses = reference(outputs, arrays), []
    for step in range(1, steps + 1):
        program.write(inputs.schedule, optimizer.schedule(step, rate * (1 - step / (steps + 1))))
        program()
        losses.append(float(program.read(made.loss)))
    assert losses[0] > 10
    assert losses[-1] < 1e-5


def test_a_product_is_found_by_lbfgs() -> None:
    loss, (a, b), arrays = product()
    flat, gradient = (np.zeros(a.size + b.size, np.float32) for _ in range(2))
    flat[:] = np.concatenate([arrays[a].ravel(), arrays[b].ravel()])
    made = differentiate(loss, [a, b])
    memory = {a: flat[: a.size].reshape(a.shape), b: flat[a.size :].reshape(b.shape)}
    pinned = {
        made.grads[a]: gradient[: a.size].reshape(a.shape),
        made.grads[b]: gradient[a.size :].reshape(b.shape),
    }
    program = reference([made.loss, *made.grads.values()], arrays | memory | pinned)

    def evaluate(point: np.ndarray) -> tuple[float, np.ndarray]:
        flat[:] = point
        program()
        return float(program.read(made.loss)), gradient

    found = LbfgsState(flat)
    for _ in range(80):
        if found.step(evaluate):
            break
    assert found.loss < 1e-6
    assert found.iteration < 80
