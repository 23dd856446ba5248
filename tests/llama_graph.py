"""A llama's training graph built by hand, until the model has a room of its own: for tests and for the benchmark."""

from dataclasses import dataclass, field

import numpy as np

from llamatrain.files.quants import encode
from llamatrain.graph.ops import (
    add,
    cross_entropy_loss,
    flash_attn,
    get_rows,
    linear_cross_entropy,
    matmul,
    reshape,
    rms_norm,
    rope,
    scale,
    swiglu,
)
from llamatrain.graph.tensor import BF16, F32, I32, DType, Quantised, Tensor, parameter, placeholder, state
from llamatrain.kernels.reference.registry import to_bf16


@dataclass(frozen=True)
class Size:
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
    fused: bool = True  # head and loss in one


TINY = Size(vocab=8, width=32, layers=1, heads=8, kv_heads=8, ff=86, ctx=32, batch=8)
S = Size(vocab=32000, width=256, layers=4, heads=8, kv_heads=8, ff=768, ctx=64, batch=8)
M = Size(vocab=32000, width=512, layers=8, heads=8, kv_heads=4, ff=1376, ctx=256, batch=8)


@dataclass
class Llama:
    size: Size
    tokens: Tensor
    positions: Tensor
    starts: Tensor
    targets: Tensor
    weights: Tensor
    table: Tensor
    trained: list[Tensor] = field(default_factory=list)
    frozen: list[Tensor] = field(default_factory=list)
    borders: list[Tensor] = field(default_factory=list)  # each block's input
    loss: Tensor = None  # type: ignore[assignment]

    def random(self, seed: int = 0, base: bool = True) -> dict[Tensor, np.ndarray]:
        """Arrays for every leaf that matters: small weights, whole-number inputs; `base`: for the frozen weights, too."""
        size, rng = self.size, np.random.default_rng(seed)
        head = size.width // size.heads
        angles = np.outer(np.arange(size.ctx), 10000.0 ** (-np.arange(0, head // 2 * 2, 2) / head))
        rows = (size.batch, size.ctx)
        arrays = {
            self.tokens: rng.integers(0, size.vocab, rows).astype(np.int32),
            self.positions: np.broadcast_to(np.arange(size.ctx, dtype=np.int32), rows).copy(),
            self.starts: np.zeros(rows, np.int32),
            self.targets: rng.integers(0, size.vocab, rows[0] * rows[1]).astype(np.int32),
            self.weights: np.full(rows[0] * rows[1], 1 / (rows[0] * rows[1]), self.weights.dtype.numpy),
            self.table: np.stack([np.cos(angles), np.sin(angles)], -1).astype(self.table.dtype.numpy),
        }
        for weight in self.trained:
            values = rng.standard_normal(weight.shape) * (0.5 / weight.shape[-1] ** 0.5) if len(weight.shape) > 1 else 1.0
            arrays[weight] = np.broadcast_to(np.asarray(values, weight.dtype.numpy), weight.shape).copy()
        return arrays | ({weight: frozen_array(weight, rng) for weight in self.frozen} if base else {})


def frozen_array(weight: Tensor, rng: np.random.Generator) -> np.ndarray:
    """Small numbers in the weight's type; of large ones, the same rows again and again."""
    rows, columns = weight.shape
    values = (rng.standard_normal((min(rows, 256), columns)) * (0.5 / columns**0.5)).astype(np.float32)
    if isinstance(weight.dtype, Quantised):
        values = encode(values, weight.dtype.kind)
    elif weight.dtype is BF16:
        values = to_bf16(values)
    return np.resize(values, weight.dtype.held(weight.shape)).astype(weight.dtype.numpy)


def llama(size: Size, dtype: DType = F32) -> Llama:
    rows = (size.batch, size.ctx)
    tokens, head = rows[0] * rows[1], size.width // size.heads
    m = Llama(
        size,
        *(placeholder(name, rows, I32) for name in ("tokens", "positions", "starts")),
        placeholder("targets", (tokens,), I32),
        placeholder("weights", (tokens,), dtype),
        state("rope", (size.ctx, head // 2, 2), dtype),
    )

    def weight(name: str, *shape: int) -> Tensor:
        if size.lora and len(shape) > 1:
            m.frozen.append(state(name, shape, size.base if dtype is F32 else dtype))
            return m.frozen[-1]
        m.trained.append(parameter(name, shape, dtype))
        return m.trained[-1]

    def linear(x: Tensor, name: str, out: int) -> Tensor:
        y = matmul(x, weight(name, out, x.shape[-1]))
        if size.lora:
            a = parameter(f"{name}.lora_a", (size.lora, x.shape[-1]), dtype)
            b = parameter(f"{name}.lora_b", (out, size.lora), dtype)
            m.trained.extend((a, b))
            y = add(y, scale(matmul(matmul(x, a), b), by=2.0))
        return y

    def heads(x: Tensor, count: int) -> Tensor:
        return reshape(x, shape=(*rows, count, head))

    x = reshape(get_rows(weight("token_embd", size.vocab, size.width), m.tokens), shape=(tokens, size.width))
    for layer in range(size.layers):
        m.borders.append(x)
        name = f"blk.{layer}"
        h = rms_norm(x, weight(f"{name}.attn_norm", size.width), eps=1e-5)
        q = rope(heads(linear(h, f"{name}.attn_q", size.width), size.heads), m.positions, m.table)
        k = rope(heads(linear(h, f"{name}.attn_k", size.kv_heads * head), size.kv_heads), m.positions, m.table)
        v = heads(linear(h, f"{name}.attn_v", size.kv_heads * head), size.kv_heads)
        out, _ = flash_attn(q, k, v, m.starts, scale=head**-0.5)
        x = add(x, linear(reshape(out, shape=(tokens, size.width)), f"{name}.attn_output", size.width))
        h = rms_norm(x, weight(f"{name}.ffn_norm", size.width), eps=1e-5)
        gated = swiglu(linear(h, f"{name}.ffn_gate", size.ff), linear(h, f"{name}.ffn_up", size.ff))
        x = add(x, linear(gated, f"{name}.ffn_down", size.width))
    x = rms_norm(x, weight("output_norm", size.width), eps=1e-5)
    output = weight("output", size.vocab, size.width)
    if size.fused:
        m.loss = linear_cross_entropy(x, output, m.targets, m.weights)
    else:
        m.loss = cross_entropy_loss(matmul(x, output), m.targets, m.weights)
    return m
