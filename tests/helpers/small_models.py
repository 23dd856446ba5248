"""Small llamas with random weights, in memory and as files."""

from pathlib import Path
from typing import Any

import numpy as np

from llamatrain.data.tokenizer import new_vocab
from llamatrain.engine.program import Program
from llamatrain.gguf import quants
from llamatrain.gguf.reader import Gguf
from llamatrain.gguf.types import TensorInfo, type_by_name
from llamatrain.gguf.values import Value
from llamatrain.gguf.writer import create_gguf
from llamatrain.graph.autodiff import value_and_gradients
from llamatrain.graph.tensor import F64
from llamatrain.model.architecture import Architecture
from llamatrain.model.architectures import find_architecture
from llamatrain.model.hyperparameters import Hyperparameters, default_lists, read_hyperparameters
from llamatrain.model.init import init_weights
from llamatrain.model.load import load_weights
from llamatrain.model.rope import TENSORS, Rope
from llamatrain.model.transformer import build_training, dense_mask, rope_state, trainable_weights

LLAMA = find_architecture("llama")
EMBEDDINGS, OUTPUT = "token_embd.weight", "output.weight"
VOCABULARY = 258  # two control tokens, and the bytes
Arrays = dict[str, np.ndarray]


def small(
    *,
    vocab: int = VOCABULARY,
    embd: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    ff: int = 96,
    ctx: int = 64,
    head_size: int = 16,
    rope: Rope | None = None,
    architecture: Architecture[Any, Any] = LLAMA,
    **more: Any,
) -> Hyperparameters:
    return Hyperparameters(
        architecture=architecture,
        vocab=vocab,
        embd=embd,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        ff=ff,
        ctx=ctx,
        head_size=head_size,
        rope=rope or Rope(head_size),
        lists=default_lists(architecture, layers, head_size),
        **more,
    )


def weights(h: Hyperparameters, seed: int = 1) -> Arrays:
    """Larger than those of a new model, so that one token is not as likely as the other; norms are not all 1."""
    made = {name: np.empty(shape, np.float32) for name, shape in h.shapes.items()}
    init_weights(h, seed, made)
    random = np.random.default_rng(seed)
    for name, array in made.items():
        if array.ndim == 1:
            array += 0.2 * random.standard_normal(array.shape, np.float32)
        else:
            array *= 3 if name != "token_embd.weight" else 8 if h.tied else 30
    return made


def tokens(count: int, seed: int = 0, vocab: int = VOCABULARY) -> list[int]:
    return [0, *np.random.default_rng(seed).integers(2, vocab, count - 1).tolist()]


def written(
    path: Path, h: Hyperparameters, arrays: Arrays, kind: str = "F32", more: dict[str, Value] | None = None
) -> Path:
    """A model file; its matrices are of a kind."""
    vocabulary = (
        new_vocab.bytes_vocabulary() if h.vocab == VOCABULARY else new_vocab.textless_vocabulary(h.vocab)
    )
    metadata = h.metadata("small") | vocabulary | (more or {})
    tensors = arrays | {TENSORS[name]: factors for name, factors in h.rope.tensors.items()}
    kinds = {name: type_by_name(kind if array.ndim == 2 else "F32") for name, array in tensors.items()}
    with create_gguf(
        path, metadata, [TensorInfo(name, kinds[name], array.shape) for name, array in tensors.items()]
    ) as out:
        for name, array in tensors.items():
            out.write(name, quants.encode(array, kinds[name]))
    return path


def loaded(gguf: Gguf) -> tuple[Hyperparameters, Arrays]:
    """The model in a file, and its weights in float32."""
    h = read_hyperparameters(gguf)
    arrays = {name: np.empty(shape, np.float32) for name, shape in h.shapes.items()}
    load_weights(gguf, arrays)
    return h, arrays


def loss_of(h: Hyperparameters, arrays: Arrays, length: int, flash: bool = True) -> tuple[float, Arrays]:
    """In float64, of random tokens; and its gradients, but those of biases that only choose experts."""
    leaves, table = trainable_weights(h, F64), rope_state(h, length, F64)
    made = build_training(h, leaves, 1, length, table, flash=flash)
    trained = [name for name in leaves if "exp_probs_b" not in name]
    loss, grads = value_and_gradients(made.loss, [leaves[name] for name in trained])
    memory = {leaves[name]: array for name, array in arrays.items()} | {
        table: h.rope_table(length).astype(np.float64)
    }
    program, ids = Program.build([loss, *grads], memory, kernels="reference"), np.array(tokens(length + 1))
    sight = {"starts": 0} if flash else {"mask": dense_mask(np.zeros((1, length), np.int32))}
    given = {"tokens": ids[:-1], "positions": np.arange(length), **sight, "targets": ids[1:], "weights": 1}
    for name, values in given.items():
        program.write(made.inputs[name], values)
    program()
    return float(program.read(loss)), {
        name: program.read(grad).copy() for name, grad in zip(trained, grads, strict=True)
    }
