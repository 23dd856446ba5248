"""The whole against torch: each parameter's gradient by name, then ten losses."""

import numpy as np
import pytest

from llamatrain.engine.program import Program
from llamatrain.graph.autodiff import value_and_gradients
from tests.helpers.llama_step import OPTIMIZER, LlamaStep
from tests.helpers.random_models import Size, llama

pytestmark = pytest.mark.reference

SIZE = Size(vocab=40, width=32, layers=2, heads=4, kv_heads=2, ff=48, ctx=12, batch=3)
KERNELS = ["reference", "cpu"]


def peer(model, memory):
    """torch's llama with the same weights."""
    import torch

    from tests.helpers.torch_llama import TorchLlama

    twin = TorchLlama(model.size)
    parameters = dict(twin.named_parameters())
    assert len(parameters) == len(model.trained)
    with torch.no_grad():
        for weight in model.trained:
            parameters[weight.name].copy_(torch.from_numpy(memory[weight]))
    return twin


def batch(model, memory):
    import torch

    return [torch.from_numpy(memory[leaf].copy()) for leaf in (model.tokens, model.targets, model.weights)]


@pytest.mark.parametrize("kernels", KERNELS)
def test_every_gradient_by_name(kernels: str) -> None:
    model = llama(SIZE)
    memory = model.random(3)
    memory[model.targets][::5] = -1  # no target
    loss, gradients = value_and_gradients(model.loss, model.trained)
    program = Program.build([loss, *gradients], memory, kernels=kernels, threads=2)
    program()

    twin = peer(model, memory)
    expected = twin.loss(*batch(model, memory))
    expected.backward()
    assert float(program.read(loss)) == pytest.approx(expected.item(), rel=1e-5)
    parameters = dict(twin.named_parameters())
    for weight, gradient in zip(model.trained, gradients, strict=True):
        wanted = parameters[weight.name].grad.numpy()
        np.testing.assert_allclose(
            program.read(gradient), wanted, atol=1e-4 * np.abs(wanted).max(), err_msg=weight.name
        )


@pytest.mark.parametrize("kernels", KERNELS)
def test_ten_losses(kernels: str) -> None:
    from tests.helpers.torch_llama import training_step

    step = LlamaStep(SIZE, kernels=kernels, threads=2)
    twin = peer(step.model, step.memory)
    twin_step = training_step(
        twin, *batch(step.model, step.memory), bf16=False, rate=0.01, decay=OPTIMIZER.weight_decay
    )
    ours = [step(rate=0.01) for _ in range(10)]
    theirs = [twin_step() for _ in range(10)]
    assert ours[-1] < ours[0] - 0.5
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
