"""The llama against plain torch: logits, and each parameter's gradient by its name."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from llamatrain.engine.program import Program
from llamatrain.graph.autodiff import value_and_gradients
from llamatrain.graph.tensor import Tensor
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.rope import Rope
from llamatrain.model.transformer import build_training, dense_mask, rope_state, trainable_weights
from tests.helpers.small_models import Arrays, small, weights

pytestmark = pytest.mark.reference

FACTORS = np.array([1.0, 1.0, 1.3, 2.5, 5.0, 8.0, 8.0, 8.0], np.float32)
SHAPES = {
    "grouped": small(vocab=50),
    "all heads": small(vocab=50, kv_heads=4),
    "one head of keys": small(vocab=50, kv_heads=1, tied=True),
    "heads of 48": small(vocab=50, embd=96, heads=2, kv_heads=1, head_size=48, rms_eps=1e-2),
    "heads of 80": small(vocab=50, embd=160, heads=2, kv_heads=2, head_size=80, tied=True, layers=1),
    "heads apart from the width": small(vocab=33, embd=20, heads=3, kv_heads=3, head_size=6, ff=7),
    "base": small(vocab=50, rope=Rope(16, base=500000.0)),
    "linear": small(vocab=50, rope=Rope(16, kind="linear", factor=4.0)),
    "factors": small(vocab=50, rope=Rope(16, base=500000.0, factors=FACTORS)),
    "yarn": small(vocab=50, rope=Rope(16, kind="yarn", factor=4.0, original_ctx=64)),
    "yarn, and longer": small(
        vocab=50, rope=Rope(16, base=100.0, kind="yarn", factor=3.0, original_ctx=20, length=1.2)
    ),
}


def turns(rope: Rope) -> tuple[np.ndarray, float]:
    """How far each pair turns a position, and how long it gets: as the papers have it."""
    frequencies, length = [], rope.length
    for pair in range(rope.size // 2):
        frequency = 1.0 / rope.base ** (2 * pair / rope.size)
        if rope.factors is not None:
            frequency /= float(rope.factors[pair])
        if rope.kind == "linear":
            frequency /= rope.factor
        if rope.kind == "yarn":

            def where(rotations: float) -> float:
                return (
                    rope.size
                    * math.log(rope.original_ctx / (rotations * 2 * math.pi))
                    / (2 * math.log(rope.base))
                )

            low, high = max(math.floor(where(32)), 0), min(math.ceil(where(1)), rope.size - 1)
            ramp = min(1.0, max(0.0, (pair - low) / max(high - low, 0.001)))
            frequency = frequency / rope.factor * ramp + frequency * (1 - ramp)
        frequencies.append(frequency)
    return np.array(frequencies), length * (0.1 * math.log(rope.factor) + 1.0 if rope.kind == "yarn" else 1.0)


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Logits in torch: (batch * length, vocabulary)."""
    import torch

    from tests.helpers import plain_llama

    def logits(
        h: Hyperparameters, made: dict[str, torch.Tensor], batch: dict[str, np.ndarray]
    ) -> torch.Tensor:
        frequencies, length = turns(h.rope)

        def rotated(x: torch.Tensor, positions: torch.Tensor, base: float) -> torch.Tensor:
            angles = positions.double()[..., None] * torch.tensor(frequencies)
            pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
            turned = pairs * torch.polar(torch.full_like(angles, length), angles).to(pairs.dtype)
            return torch.view_as_real(turned).flatten(-2)

        monkeypatch.setattr(plain_llama, "rotated", rotated)
        numbers = plain_llama.Numbers(h.heads, h.kv_heads, h.rms_eps)
        rows = [{name: values[row] for name, values in batch.items()} for row in range(len(batch["tokens"]))]
        return plain_llama.logits(made, numbers, rows).flatten(0, 1)

    return logits


def batch_of(h: Hyperparameters, rows: int, length: int) -> dict[str, np.ndarray]:
    """Random rows; every other one is two samples packed."""
    random = np.random.default_rng(5)
    starts, positions = (
        np.zeros((rows, length), np.int32),
        np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
    )
    starts[1::2, length // 3 :] = length // 3
    positions[1::2, length // 3 :] -= length // 3
    return {
        "tokens": random.integers(0, h.vocab, (rows, length)).astype(np.int32),
        "positions": positions,
        "starts": starts,
        "targets": random.integers(0, h.vocab, (rows, length)),
        "weights": random.integers(0, 3, (rows, length)) / (rows * length),
    }


Ours = tuple[float, np.ndarray | None, Arrays]


def ours(h: Hyperparameters, arrays: Arrays, batch: dict[str, np.ndarray], kernels: str, **how: bool) -> Ours:
    """The loss, the logits if the graph holds them, and the gradients by name."""
    leaves, (rows, length) = trainable_weights(h), batch["tokens"].shape
    table = rope_state(h, length)
    made = build_training(h, leaves, rows, length, table, **how)
    held = [node_logits] if (node_logits := logits_in(made.loss)) is not None else []
    loss, grads = value_and_gradients(made.loss, list(leaves.values()))
    memory = (
        {leaves[name]: arrays[name] for name in leaves} | {table: h.rope_table(length)} | made.more_states
    )
    program = Program.build([loss, *grads, *held], memory, kernels=kernels, threads=2)
    for name, leaf in made.inputs.items():
        values = dense_mask(batch["starts"]) if name == "mask" else batch[name]
        program.write(leaf, values.reshape(leaf.shape))
    program()
    found = {name: program.read(grad).copy() for name, grad in zip(leaves, grads, strict=True)}
    return float(program.read(loss)), program.read(held[0]).copy() if held else None, found


def logits_in(loss: Tensor) -> Tensor | None:
    """The product with the output weight, where the graph makes it whole."""
    waiting = [loss]
    while waiting:
        tensor = waiting.pop()
        if tensor.name == "output":
            return tensor if tensor.node else None
        if tensor.node and tensor.name != "output_norm":
            waiting += tensor.node.sources
    return None


def compare(h: Hyperparameters, batch: dict[str, np.ndarray], theirs: Any, kernels: str, **how: bool) -> None:
    import torch

    from tests.helpers.plain_llama import weights_of

    arrays = weights(h)
    loss, logits, grads = ours(h, arrays, batch, kernels, **how)
    made = weights_of(arrays)
    expected = theirs(h, made, batch)
    targets, shares = (
        torch.tensor(batch["targets"]).flatten(),
        torch.tensor(batch["weights"], dtype=torch.float32).flatten(),
    )
    if how.get("squared"):
        wanted = 2 * torch.nn.functional.one_hot(targets, h.vocab) - 1
        total = ((expected - wanted).square().sum(-1) * shares).sum()
    else:
        total = (torch.nn.functional.cross_entropy(expected, targets, reduction="none") * shares).sum()
    total.backward()
    assert loss == pytest.approx(total.item(), rel=1e-5)
    if logits is not None:
        assert np.abs(logits - expected.detach().numpy()).max() <= 1e-4 * expected.abs().max().item()
    assert made.keys() == grads.keys()
    for name, parameter in made.items():
        assert parameter.grad is not None
        wanted_grad = parameter.grad.numpy()
        assert np.linalg.norm(grads[name] - wanted_grad) <= 1e-4 * np.linalg.norm(wanted_grad), name


@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_gradients(name: str, theirs: Any) -> None:
    compare(SHAPES[name], batch_of(SHAPES[name], 2, 23), theirs, "cpu")


FEW = ["grouped", "yarn", "one head of keys", "heads of 80"]


@pytest.mark.parametrize("name", FEW)
def test_without_flash_attention(name: str, theirs: Any) -> None:
    compare(SHAPES[name], batch_of(SHAPES[name], 3, 17), theirs, "cpu", flash=False)


@pytest.mark.parametrize("name", FEW)
def test_by_plain_kernels(name: str, theirs: Any) -> None:
    compare(SHAPES[name], batch_of(SHAPES[name], 2, 11), theirs, "reference")


@pytest.mark.parametrize(("flash", "rows"), [(True, 1), (False, 7)])
def test_squared_loss(flash: bool, rows: int, theirs: Any) -> None:
    h = small(vocab=9, embd=32, heads=8, kv_heads=8, head_size=4, layers=1)
    compare(h, batch_of(h, rows, 13), theirs, "cpu", flash=flash, squared=True)


def test_a_longer_context_is_the_same_model() -> None:
    """The context is no part of what is computed, but where YaRN takes it for the original one."""
    h = small(vocab=50)
    batch, arrays = batch_of(h, 1, 9), weights(h)
    assert ours(h, arrays, batch, "cpu")[0] == ours(replace(h, ctx=999), arrays, batch, "cpu")[0]
