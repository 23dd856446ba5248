"""Cases of `bench.py kernels`: each kernel at a size that shows its speed, and its peer in torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from llamatrain.gguf.quants import encode
from llamatrain.gguf.types import type_by_name
from llamatrain.graph import ops as O
from llamatrain.graph.op_cost import estimate_cost
from llamatrain.graph.precision import round_products
from llamatrain.graph.tensor import (
    BF16,
    F32,
    I32,
    DType,
    Tensor,
    collect_nodes,
    parameter,
    placeholder,
    quantized,
    state,
)
from llamatrain.kernels.reference.registry import to_bf16

Peer = Callable[
    [Any, list[Any]], Callable[[], Any]
]  # torch, the leaves as its tensors -> the function to time


@dataclass
class Case:
    """A small graph over random leaves."""

    shape: str = ""
    outputs: Sequence[Tensor] = ()
    peer: Peer | None = None
    floor: str = ""  # the required ratio: "torch 1.2" or "copy 0.7"
    tolerance: float = 2e-5  # of the largest element
    arrays: dict[Tensor, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(1)

    @property
    def flops(self) -> int:
        """The floating point operations."""
        return sum(estimate_cost(node).flops for node in collect_nodes(self.outputs))

    @property
    def bytes_moved(self) -> int:
        """The bytes that must move, if memory is the limit."""
        return (
            0 if self.flops else sum(estimate_cost(node).bytes_moved for node in collect_nodes(self.outputs))
        )

    def x(self, *shape: int, dtype: DType = F32, make: Callable[..., Tensor] = placeholder) -> Tensor:
        """Add a leaf of normal random numbers."""
        values = self.random.standard_normal(shape, np.float32)
        return self.leaf(to_bf16(values) if dtype is BF16 else values, dtype, make)

    def weight(self, rows: int, columns: int, kind: str) -> Tensor:
        """Add a frozen weight of a type."""
        tensor = state(f"x{len(self.arrays)}", (rows, columns), quantized(kind))
        self.arrays[tensor] = encode(
            self.random.standard_normal((rows, columns), np.float32) * columns**-0.5, type_by_name(kind)
        )
        return tensor

    def ids(self, limit: int, *shape: int) -> Tensor:
        """Add a leaf of random integers below a limit."""
        return self.leaf(self.random.integers(0, limit, shape).astype(np.int32), I32)

    def leaf(
        self, values: np.ndarray, dtype: DType = F32, make: Callable[..., Tensor] = placeholder
    ) -> Tensor:
        """Add a leaf with these values."""
        tensor = make(f"x{len(self.arrays)}", values.shape, dtype)
        self.arrays[tensor] = np.ascontiguousarray(values)
        return tensor


CASES: dict[str, Callable[[Case], Case]] = {}


def case(*names: str) -> Callable[[Callable[..., Case]], Callable[..., Case]]:
    """Register a case under each name; the function receives the name."""

    def register(make: Callable[..., Case]) -> Callable[..., Case]:
        for name in names:
            CASES[name] = partial(make, name=name)
        return make

    return register


def backward_pass(torch: Any, y: Any, wrt: Sequence[Any], dy: Any) -> Callable[[], Any]:
    """Return a function that computes torch's gradients."""
    return lambda: torch.autograd.grad(y, wrt, dy, retain_graph=True)


def require_grad(*tensors: Any) -> list[Any]:
    """Mark torch tensors as differentiable and return them."""
    return [tensor.requires_grad_() for tensor in tensors]


# ---- products of matrices --------------------------------------------------

LINEAR = [
    (2048, 1376, 512),
    (2048, 512, 512),
    (512, 2048, 2048),
    (512, 5632, 2048),
    (2048, 32000, 512),
]  # rows, out, in


def linear_peer(bf16: bool) -> Peer:
    """Return torch's y, dx and dW with float32 in and out."""

    def peer(torch: Any, leaves: list[Any]) -> Callable[[], Any]:
        x, w, dy = leaves
        require_grad(x, w)

        def run() -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                y = torch.nn.functional.linear(x, w)
            return torch.autograd.grad(y.float(), (x, w), dy)

        return run

    return peer


def linear(c: Case, rows: int, out: int, inside: int, bf16: bool) -> Case:
    """Build a linear layer's forward and backward products."""
    x, w, dy = c.x(rows, inside), c.x(out, inside, make=parameter), c.x(rows, out)
    outputs = [O.matmul(x, w), O.matmul_nn(dy, w), O.out_prod(dy, x)]
    c.outputs = round_products(outputs) if bf16 else outputs
    c.shape, c.peer = f"{rows} x {out} x {inside}", linear_peer(bf16)
    c.floor = "torch 1.0" if bf16 else "torch 0.85"
    return c


for bf16 in (True, False):
    for rows, out, inside in LINEAR:
        CASES[f"linear-{'bf16' if bf16 else 'f32'}-{rows}x{out}x{inside}"] = partial(
            linear, rows=rows, out=out, inside=inside, bf16=bf16
        )


# ---- frozen weights --------------------------------------------------------


def frozen_linear(c: Case, kind: str, rows: int, bf16: bool) -> Case:
    """Build y and dx with a weight in a file's format; for one row only y."""
    w = c.weight(5632, 2048, kind)
    x, dy = (c.x(rows, columns, dtype=BF16 if bf16 else F32) for columns in (2048, 5632))
    c.outputs = [O.matmul(x, w), *([O.matmul_nn(dy, w)] if rows > 1 else [])]
    c.shape, c.tolerance = f"{rows} x 5632 x 2048", 2e-4
    return c


for kind in ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "F16"):
    for rows, bf16 in ((512, True), (512, False), (1, False)):
        CASES[f"{kind.lower()}-{'bf16' if bf16 else 'f32'}-{rows}"] = partial(
            frozen_linear, kind=kind, rows=rows, bf16=bf16
        )


def int8_linear(c: Case, kind: str, out: int) -> Case:
    """Build y and dx in 8-bit integers, with a weight in a file's format."""
    w, x, dy = c.weight(out, 2048, kind), c.x(512, 2048), c.x(512, out)
    c.outputs = [O.matmul_int8(x, w), O.matmul_nn_int8(dy, w)]
    c.shape, c.tolerance = f"512 x {out} x 2048", 0.0
    return c


for kind in ("Q8_0", "Q4_K"):
    for out in (2048, 5632):
        CASES[f"{kind.lower()}-int8-512x{out}"] = partial(int8_linear, kind=kind, out=out)


# ---- the head --------------------------------------------------------------


def head_peer(bf16: bool, back: bool) -> Peer:
    """Return torch's head and loss, forward or backward."""

    def peer(torch: Any, leaves: list[Any]) -> Callable[[], Any]:
        x, w, targets, _weights = leaves[:4]
        targets = targets.long()
        if back:
            require_grad(x, w)

        def run() -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, w), targets)
            return torch.autograd.grad(loss, (x, w)) if back else loss

        return run

    return peer


@case("head-bf16", "head-f32", "head-forward-bf16", "head-forward-f32")
def head(c: Case, name: str) -> Case:
    """Build the fused head and loss."""
    rows, width, words = 2048, 512, 32000
    bf16 = name.endswith("bf16")
    back = "forward" not in name
    x, w = c.leaf(c.random.standard_normal((rows, width), np.float32)), c.x(words, width, make=parameter)
    c.arrays[w] *= 0.05
    targets, weights = c.ids(words, rows), c.leaf(np.full(rows, 1 / rows, np.float32))
    if back:
        dloss = c.leaf(np.ones((), np.float32))
        outputs = list(O.linear_cross_entropy_back(dloss, x, w, targets, weights, dx=True, dw=True))
    else:
        outputs = [O.linear_cross_entropy(x, w, targets, weights)]
    c.outputs, c.peer = round_products(outputs) if bf16 else outputs, head_peer(bf16, back)
    c.shape = f"{rows} x {width} x {words}"
    c.floor, c.tolerance = ("torch 1.8" if bf16 else "torch 0.95") if back else "", 2e-2 if bf16 else 1e-4
    return c


# ---- attention -------------------------------------------------------------


def attention_peer(bf16: bool) -> Peer:
    """Return torch's fused attention, forward and backward."""

    def peer(torch: Any, leaves: list[Any]) -> Callable[[], Any]:
        q, k, v, dout = (
            leaf.transpose(1, 2).contiguous() for leaf in leaves[:4]
        )  # (B, H, T, d), as torch likes it
        kind = torch.bfloat16 if bf16 else torch.float32
        q, k, v = require_grad(*(tensor.to(kind) for tensor in (q, k, v)))
        dout = dout.to(kind)

        def run() -> Any:
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return torch.autograd.grad(out, (q, k, v), dout)

        return run

    return peer


@case("attention-f32", "attention-bf16")
def attention(c: Case, name: str) -> Case:
    """Build causal attention, forward and backward."""
    batch, ctx, heads, size = 4, 512, 8, 64
    bf16 = name.endswith("bf16")
    shape = (batch, ctx, heads, size)
    dtype = BF16 if bf16 else F32
    leaves = [c.x(*shape, dtype=dtype) for _ in range(3)]
    dout, starts = c.x(*shape), c.leaf(np.zeros((batch, ctx), np.int32), I32)
    out, lse = O.flash_attn(*leaves, starts, scale=size**-0.5)
    c.outputs = [out, *O.flash_attn_back(dout, *leaves, out, lse, starts, scale=size**-0.5)]
    c.shape = f"{batch} x {ctx} x {heads} x {size}"
    c.peer, c.floor, c.tolerance = attention_peer(bf16), "torch 1.2", 2e-2 if bf16 else 1e-4
    return c


def build_cases(words: Sequence[str]) -> Iterator[tuple[str, Case]]:
    """Build the cases whose names contain one of the words, or all without words, one after the other."""
    for name, make in CASES.items():
        if not words or any(word in name for word in words):
            built = make(Case())
            built.shape = built.shape or " x ".join(map(str, next(iter(built.arrays)).shape))
            yield name, built
