"""The last hidden states of small models for embeddings, and gradients through them: ours, and those of Hugging Face's classes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain.contrastive.forward import embedding_inputs
from llamatrain.engine.program import Program
from llamatrain.gguf.reader import open_gguf
from llamatrain.graph import ops as O
from llamatrain.graph.autodiff import value_and_gradients
from llamatrain.graph.tensor import F32, F64, placeholder
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.transformer import forward, rope_state, trainable_weights
from llamatrain.model.visible_keys import visible_ranges
from tests.helpers import architecture_torch as theirs
from tests.helpers.architecture_family import Shape
from tests.helpers.architecture_models import Arrays, prompt, rows, weights, written
from tests.helpers.architecture_runs import seen
from tests.helpers.architectures import FAMILIES
from tests.helpers.small_models import loaded

EMBEDDERS = {arch: family.shapes for arch, family in FAMILIES.items() if not family.predicts_text}
CASES = [(arch, name) for arch, shapes in EMBEDDERS.items() for name in shapes]
IDS = prompt()


def direction(count: int, width: int) -> np.ndarray:
    """Return what hidden states are multiplied with, whose sum is differentiated."""
    return np.random.default_rng(6).standard_normal((count, width)).astype(np.float32)


def corner(hidden: np.ndarray) -> list[float]:
    """Return some of all hidden states, from places at both ends and between."""
    return [float(value) for value in hidden[::6, 3:15:2].ravel()]


def told(shape: Shape) -> dict[str, Any]:
    """Return what is compared of Hugging Face's model."""
    torch = pytest.importorskip("torch")
    made = theirs.model(shape, weights(shape))
    hidden = made(torch.tensor([IDS])).last_hidden_state[0]
    (hidden * torch.from_numpy(direction(*hidden.shape))).sum().backward()
    named = dict(made.named_parameters())
    gradients = {
        mine: theirs.change_to_ours(shape, mine, named[name].grad.numpy())
        for mine, (name, _) in rows(shape).items()
    }
    return {"hidden": corner(hidden.detach().numpy()), "gradients": seen(gradients)}


def model(folder: Path, shape: Shape) -> tuple[Hyperparameters, Arrays]:
    """Return the model, read from a file."""
    return loaded(open_gguf(written(folder / "model.gguf", shape, weights(shape))))


def run(
    h: Hyperparameters,
    arrays: Arrays,
    samples: list[list[int]],
    padding: int = 0,
    kernels: str = "cpu",
    factors: np.ndarray | None = None,
) -> tuple[np.ndarray, Arrays, float]:
    """Return the hidden states of samples in one row, the gradients of all weights, and the sum that has these."""
    sizes = [*map(len, samples), *[1] * padding]
    begin = np.repeat(np.cumsum([0, *sizes[:-1]]), sizes).astype(np.int32)[None]
    last = np.repeat(np.cumsum(sizes) - 1, sizes).astype(np.int32)[None]
    length, dtype = sum(sizes), F64 if arrays["output_norm.weight"].dtype == np.float64 else F32
    leaves, table = trainable_weights(h, dtype), rope_state(h, length, dtype)
    inputs = embedding_inputs(h, 1, length, table, flash=True)
    hidden, _ = forward(h, leaves, inputs, table)
    used = sum(map(len, samples))
    way = np.zeros((length, h.embd), dtype.numpy)
    way[:used] = direction(used, h.embd) if factors is None else factors
    multiplier = placeholder("factors", way.shape, dtype)
    value, grads = value_and_gradients(O.sum(O.mul(hidden, multiplier)), list(leaves.values()))
    memory = {leaves[name]: array for name, array in arrays.items()}
    memory[table] = h.rope_table(length).astype(dtype.numpy)
    program = Program.build([hidden, value, *grads], memory, kernels=kernels)
    tokens = [token for sample in samples for token in sample] + [0] * padding
    given = {"tokens": tokens, "positions": np.arange(length) - begin[0]} | visible_ranges(h, begin, last)
    for name, values in given.items():
        program.write(inputs[name], values)
    program.write(multiplier, way)
    program()
    found = {name: program.read(grad).copy() for name, grad in zip(leaves, grads, strict=True)}
    return program.read(hidden)[:used].copy(), found, float(program.read(value))
