"""Llamas of any size with random weights and one batch of random tokens, for benchmarks and tests."""

from dataclasses import dataclass

import numpy as np

from llamatrain.gguf.quants import encode
from llamatrain.graph.tensor import BF16, F32, DType, QuantizedType, Tensor, parameter, state
from llamatrain.kernels.reference.registry import to_bf16
from llamatrain.model.architectures import DEFAULT, find_architecture
from llamatrain.model.hyperparameters import Hyperparameters, default_extra, default_lists
from llamatrain.model.lora import Delta, Weights
from llamatrain.model.rope import Rope
from llamatrain.model.transformer import build_training, dense_mask, rope_state


@dataclass(frozen=True)
class Size:
    """The sizes of a model and of its batch."""

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    ff: int
    ctx: int
    batch: int
    lora: int = 0  # rank of an adapter on every linear weight; the weights themselves are frozen then
    base: DType = F32  # of the frozen weights
    fused: bool = True  # fused attention, and fused head and loss
    arch: str = DEFAULT

    @property
    def h(self) -> Hyperparameters:
        """The hyperparameters of the model."""
        head = self.width // self.heads
        architecture = find_architecture(self.arch)
        return Hyperparameters(
            vocab=self.vocab,
            embd=self.width,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            ff=self.ff,
            ctx=self.ctx,
            head_size=head,
            rope=Rope(head // 2 * 2),
            tied=architecture.ties_by_default,
            extra=default_extra(architecture, {"head_size": head, "embd": self.width}),
            by_block=architecture.new_model_blocks(self.layers, self.kv_heads),
            optional_weights=architecture.new_model_weights,
            lists=default_lists(architecture, self.layers, head),
            architecture=architecture,
        )


TINY = Size(vocab=8, width=32, layers=1, heads=8, kv_heads=8, ff=86, ctx=32, batch=8)
S = Size(vocab=32000, width=256, layers=4, heads=8, kv_heads=8, ff=768, ctx=64, batch=8)
M = Size(vocab=32000, width=512, layers=8, heads=8, kv_heads=4, ff=1376, ctx=256, batch=8)
SIZES = {"tiny": TINY, "S": S, "M": M}


class Llama:
    """The training graph of a model, and its leaves."""

    def __init__(self, size: Size, dtype: DType) -> None:
        self.size = size
        self.dtype = dtype
        self.trained: list[Tensor] = []
        self.frozen: list[Tensor] = []
        self.table = rope_state(size.h, size.ctx, dtype)
        deltas: dict[str, list[Delta]] = {}
        tensors: dict[str, Tensor] = {}
        for name, shape in size.h.shapes.items():
            tensors[name] = self._weight(name, shape)
            if size.lora and len(shape) > 1 and name.startswith("blk."):
                a = parameter(f"{name}.lora_a", (size.lora, shape[1]), dtype)
                b = parameter(f"{name}.lora_b", (shape[0], size.lora), dtype)
                self.trained += a, b
                deltas[name] = [Delta(a, b, 2.0)]
        graph = build_training(
            size.h, Weights(tensors, deltas), size.batch, size.ctx, self.table, flash=size.fused
        )
        self.inputs = graph.inputs
        self.block_inputs = graph.block_inputs
        self.loss = graph.loss
        self.tokens = graph.inputs["tokens"]
        self.targets = graph.inputs["targets"]
        self.weights = graph.inputs["weights"]

    def _weight(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if self.size.lora and len(shape) > 1:
            self.frozen.append(state(name, shape, self.size.base if self.dtype is F32 else self.dtype))
            return self.frozen[-1]
        self.trained.append(parameter(name, shape, self.dtype))
        return self.trained[-1]

    def random(self, seed: int = 0, base: bool = True) -> dict[Tensor, np.ndarray]:
        """Return arrays for the leaves: small weights and integer inputs; with `base` also frozen weights."""
        size = self.size
        rng = np.random.default_rng(seed)
        rows = (size.batch, size.ctx)
        arrays = {
            self.tokens: rng.integers(0, size.vocab, rows).astype(np.int32),
            self.targets: rng.integers(0, size.vocab, rows[0] * rows[1]).astype(np.int32),
            self.weights: np.full(rows[0] * rows[1], 1 / (rows[0] * rows[1]), self.dtype.numpy),
            self.table: size.h.rope_table(size.ctx).astype(self.dtype.numpy),
            **self.position_arrays(np.zeros(rows, np.int32)),
        }
        for weight in self.trained:
            values = (
                rng.standard_normal(weight.shape) * (0.5 / weight.shape[-1] ** 0.5)
                if len(weight.shape) > 1
                else 1.0
            )
            arrays[weight] = np.broadcast_to(np.asarray(values, weight.dtype.numpy), weight.shape).copy()
        return arrays | ({weight: frozen_array(weight, rng) for weight in self.frozen} if base else {})

    def position_arrays(self, starts: np.ndarray) -> dict[Tensor, np.ndarray]:
        """Return positions and masks for samples that start at these columns: (batch, ctx)."""
        positions = (np.arange(self.size.ctx, dtype=np.int32) - starts).astype(np.int32)
        arrays = {self.inputs["positions"]: positions}
        if "starts" in self.inputs:
            return arrays | {self.inputs["starts"]: starts}
        return arrays | {self.inputs["mask"]: dense_mask(starts).astype(self.dtype.numpy)}


def frozen_array(weight: Tensor, rng: np.random.Generator) -> np.ndarray:
    """Return small numbers in the type of a weight; large weights repeat their rows."""
    rows, columns = weight.shape
    values = (rng.standard_normal((min(rows, 256), columns)) * (0.5 / columns**0.5)).astype(np.float32)
    if isinstance(weight.dtype, QuantizedType):
        values = encode(values, weight.dtype.kind)
    elif weight.dtype is BF16:
        values = to_bf16(values)
    return np.resize(values, weight.dtype.storage_shape(weight.shape)).astype(weight.dtype.numpy)


def llama(size: Size, dtype: DType = F32) -> Llama:
    """Build the graph of a size."""
    return Llama(size, dtype)
