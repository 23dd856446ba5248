"""Cases of `bench.py kernels` for ops of other architectures, and their blocks to compare to a llama's."""

from functools import partial
from typing import Any

import numpy as np

from bench.kernel_cases import CASES, Case, case
from bench.model_block import BLOCKS, Block
from llamatrain.graph import ops as O
from llamatrain.graph.precision import round_products
from llamatrain.graph.tensor import BF16, F32, I32, DType, parameter
from llamatrain.optim.update_graph import differentiate

ROWS, WIDTH = 16384, 1024  # 64 MB


def block(c: Case, kind: str, bf16: bool) -> Case:
    """Build a block, forward and backward, to compare by FLOP/s. A window keeps a quarter of the tokens."""
    options = BLOCKS[kind] | ({"window": 128} if "window" in BLOCKS[kind] else {})
    built = Block(rows=2, ctx=512, heads=12, groups=4, size=64, ff=2048, **options)
    result = differentiate(built.loss, built.trained, precision="bf16" if bf16 else "f32")
    c.outputs = [result.loss, *result.grads.values()]
    c.arrays = built.arrays()
    c.shape = f"{built.rows * built.ctx} x {built.width}"
    c.tolerance = 5e-2 if bf16 else 2e-4
    return c


for kind in BLOCKS:
    for bf16 in (True, False):
        CASES[f"block-{kind}-{'bf16' if bf16 else 'f32'}"] = partial(block, kind=kind, bf16=bf16)


@case("attention-window-bf16", "attention-cap-bf16")
def attention(c: Case, name: str) -> Case:
    """Build attention with a window or with capped scores."""
    batch, ctx, heads, size = 1, 2048, 8, 64
    options: dict[str, Any] = {
        "scale": size**-0.5,
        **({"window": 256} if "window" in name else {"cap": 50.0}),
    }
    shape = (batch, ctx, heads, size)
    leaves = [c.x(*shape, dtype=BF16) for _ in range(3)]
    dout, starts = c.x(*shape), c.leaf(np.zeros((batch, ctx), np.int32), I32)
    out, lse = O.flash_attn(*leaves, starts, **options)
    c.outputs = [out, *O.flash_attn_back(dout, *leaves, out, lse, starts, **options)]
    c.shape, c.tolerance = " x ".join(map(str, shape)), 2e-2
    return c


def rows_and_context(name: str) -> tuple[int, int]:
    """Return the rows and their tokens: two of 512, or one of 4,096."""
    return (1, 4096) if "long" in name else (2, 512)


@case("delta_rule", "delta_rule-long", "scan", "scan-long")
def delta_rule(c: Case, name: str) -> Case:
    """Build the gated delta rule of Qwen 3.5 with 0.8 billion weights, or the same without correction, both ways."""
    batch, ctx = rows_and_context(name)
    heads, size = 16, 128
    how: dict[str, Any] = {"correct": "scan" not in name}
    q, k, v, dout = (c.random.standard_normal((batch, ctx, heads, size), np.float32) for _ in range(4))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    decay = -0.1 * np.abs(c.random.standard_normal((batch, ctx, heads), np.float32))
    beta = c.random.uniform(0, 1, (batch, ctx, heads)).astype(np.float32)
    sources = [c.leaf(x) for x in (q * np.float32(size**-0.5), k, v, decay, beta)]
    starts = c.leaf(np.zeros((batch, ctx), np.int32), I32)
    out, states = O.gated_delta_rule(*sources, starts, **how)
    c.outputs = [out, *O.gated_delta_rule_back(c.leaf(dout), *sources, starts, states, **how)]
    c.shape, c.tolerance = f"{batch} x {ctx} x {heads} x {size}", 1e-4
    return c


@case("attention-qwen35", "attention-qwen35-long")
def attention_beside_delta_rule(c: Case, name: str) -> Case:
    """Build the attention of the same model, both ways."""
    (batch, ctx), heads, groups, size = rows_and_context(name), 8, 2, 256
    q, dout = (c.x(batch, ctx, heads, size) for _ in range(2))
    k, v = (c.x(batch, ctx, groups, size) for _ in range(2))
    starts, scale = c.leaf(np.zeros((batch, ctx), np.int32), I32), size**-0.5
    out, lse = O.flash_attn(q, k, v, starts, scale=scale)
    c.outputs = [out, *O.flash_attn_back(dout, q, k, v, out, lse, starts, scale=scale)]
    c.shape, c.tolerance = f"{batch} x {ctx} x {heads} x {size}", 1e-4
    return c


@case("causal_conv", "causal_conv_back", "causal_conv_weight_back")
def convolution(c: Case, name: str) -> Case:
    """Build the convolution of the same model."""
    batch, ctx, channels, taps = 8, 512, 6144, 4
    x, w = c.x(batch, ctx, channels), c.x(channels, taps)
    starts = c.leaf(np.zeros((batch, ctx), np.int32), I32)
    if name == "causal_conv_weight_back":
        c.outputs = [O.causal_conv_weight_back(c.x(batch, ctx, channels), x, starts, taps=taps)]
    else:
        c.outputs = [getattr(O, name)(x, w, starts)]
    c.shape, c.tolerance = f"{batch} x {ctx} x {channels} x {taps}", 1e-4
    return c


@case("head-cap-bf16")
def head(c: Case, name: str) -> Case:
    """Build the backward pass of a head with capped logits."""
    rows, width, words = 2048, 512, 32000
    x, w = c.x(rows, width), c.x(words, width, make=parameter)
    c.arrays[w] *= 0.05
    targets = c.ids(words, rows), c.leaf(np.full(rows, 1 / rows, np.float32))
    dloss = c.leaf(np.ones((), np.float32))
    c.outputs = round_products(
        list(O.linear_cross_entropy_back(dloss, x, w, *targets, dx=True, dw=True, cap=30.0))
    )
    c.shape, c.tolerance = f"{rows} x {width} x {words}", 2e-2
    return c


@case("linear-bias-bf16")
def linear(c: Case, name: str) -> Case:
    """Build a linear layer with a bias."""
    x, w, bias = c.x(2048, 512), c.x(1376, 512, make=parameter), c.x(1376, make=parameter)
    c.outputs, c.shape = round_products([O.matmul(x, w, bias)]), "2048 x 1376 x 512"
    return c


@case("rope-halves", "rope_back-halves")
def rotation(c: Case, name: str) -> Case:
    """Build rotary embeddings whose pairs lie in two halves."""
    batch, ctx, heads, size = 8, 512, 32, 128
    angles = np.outer(np.arange(ctx), 10000.0 ** (-np.arange(0, size, 2) / size))
    positions = c.leaf(np.broadcast_to(np.arange(ctx, dtype=np.int32), (batch, ctx)), I32)
    table = c.leaf(np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32))
    op = O.rope_back if "back" in name else O.rope
    c.outputs, c.floor = [op(c.x(batch, ctx, heads, size), positions, table, halves=True)], "copy 0.7"
    return c


@case(
    "geglu",
    "geglu_back",
    "reglu",
    "reglu_back",
    "swiglu_halves",
    "swiglu_halves_back",
    "softcap",
    "softcap_back",
)
def elementwise(c: Case, name: str) -> Case:
    """Build gates and caps of other architectures."""
    op = getattr(O, name)
    shape = (ROWS, WIDTH)
    back = [c.x(*shape)] if name.endswith("back") else []
    sources = (
        [c.x(ROWS, 2 * WIDTH)]
        if "halves" in name
        else [c.x(*shape) for _ in range(2 if "glu" in name else 1)]
    )
    result = op(*back, *sources, **({"cap": 30.0} if "cap" in name else {}))
    c.outputs = list(result) if isinstance(result, tuple) else [result]
    c.floor = "copy 0.7"
    return c


@case("split_columns", "join_columns", "join_columns-bf16", "repeat_back")
def columns(c: Case, name: str) -> Case:
    """Build splits, joins and sums of columns."""
    sizes = (WIDTH, WIDTH // 2, WIDTH // 2)
    c.floor = "copy 0.7"
    dtype: DType = BF16 if name.endswith("bf16") else F32
    if name == "split_columns":
        c.outputs = list(O.split_columns(c.x(ROWS, sum(sizes)), sizes=sizes))
    elif name == "repeat_back":  # like the gradient of a bias
        c.outputs, c.floor = [O.repeat_back(c.x(ROWS, WIDTH), shape=(1, WIDTH))], ""
    else:
        c.outputs = [O.join_columns(*(c.x(ROWS, size) for size in sizes), dtype=dtype)]
    c.tolerance = 2e-2 if dtype is BF16 else 1e-4
    return c
