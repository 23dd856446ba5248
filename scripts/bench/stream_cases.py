"""Cases of `bench.py kernels` that memory bandwidth limits, at 64 MB and more."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from bench.kernel_cases import CASES, Case, backward_pass, case, require_grad
from llamatrain.graph import ops as O
from llamatrain.graph.tensor import BF16, I32, Tensor, parameter

ROWS, WIDTH = 16384, 1024  # 64 MB


@case("rms_norm", "rms_norm_back")
def norm(c: Case, name: str) -> Case:
    """Build RMS norm."""
    back = name.endswith("back")
    x, w = c.x(ROWS, WIDTH), c.x(WIDTH)

    def peer(torch: Any, leaves: list[Any]) -> Callable[[], Any]:
        x, w = leaves[:2]
        if not back:
            return lambda: torch.nn.functional.rms_norm(x, (WIDTH,), w, 1e-5)
        return backward_pass(
            torch,
            torch.nn.functional.rms_norm(*require_grad(x), (WIDTH,), *require_grad(w), 1e-5),
            (x, w),
            leaves[2],
        )

    c.outputs = (
        list(O.rms_norm_back(c.x(ROWS, WIDTH), x, w, eps=1e-5)) if back else [O.rms_norm(x, w, eps=1e-5)]
    )
    c.peer, c.floor = peer, "copy 0.7"
    c.tolerance = 1e-4 if back else 2e-5  # a sum over many rows
    return c


@case("swiglu", "swiglu_back")
def gate(c: Case, name: str) -> Case:
    """Build SwiGLU."""
    back = name.endswith("back")
    a, b = c.x(ROWS, WIDTH), c.x(ROWS, WIDTH)

    def peer(torch: Any, leaves: list[Any]) -> Callable[[], Any]:
        a, b = leaves[:2]
        if not back:
            return lambda: torch.nn.functional.silu(a) * b
        require_grad(a, b)
        return backward_pass(torch, torch.nn.functional.silu(a) * b, (a, b), leaves[2])

    c.outputs = list(O.swiglu_back(c.x(ROWS, WIDTH), a, b)) if back else [O.swiglu(a, b)]
    c.peer, c.floor = peer, "copy 0.7"
    return c


@case("rope", "rope_back")
def rotation(c: Case, name: str) -> Case:
    """Build rotary embeddings."""
    batch, ctx, heads, size = 8, 512, 32, 128
    angles = np.outer(np.arange(ctx), 10000.0 ** (-np.arange(0, size, 2) / size))
    x = c.x(batch, ctx, heads, size)
    positions = c.leaf(np.broadcast_to(np.arange(ctx, dtype=np.int32), (batch, ctx)), I32)
    table = c.leaf(np.stack([np.cos(angles), np.sin(angles)], -1).astype(np.float32))
    sign = -1.0 if name.endswith("back") else 1.0

    def peer(torch: Any, leaves: list[Any]) -> Callable[[], Any]:
        x, _, table = leaves
        rotations = torch.complex(table[..., 0], sign * table[..., 1])[:, None]
        return lambda: torch.view_as_real(
            torch.view_as_complex(x.unflatten(-1, (-1, 2))) * rotations
        ).flatten(-2)

    c.outputs = [(O.rope if sign > 0 else O.rope_back)(x, positions, table)]
    c.shape, c.peer, c.floor = f"{batch} x {ctx} x {heads} x {size}", peer, "copy 0.7"
    return c


@case("opt_step_adamw", "opt_step_sgd")
def optimizer(c: Case, name: str) -> Case:
    """Build an optimizer's update."""
    n, adamw = 1 << 24, name.endswith("adamw")
    w, m, v, g = c.x(n, make=parameter), c.x(n), c.x(n), c.x(n)
    c.arrays[v] **= 2
    schedule, factor = c.leaf(np.array([1e-3, 0.271, 0.003], np.float32)), c.leaf(np.ones((), np.float32))

    def peer(torch: Any, leaves: list[Any]) -> Callable[[], Any]:
        w = torch.nn.Parameter(leaves[0])
        w.grad = leaves[3]
        if adamw:
            return torch.optim.AdamW([w], lr=1e-3, weight_decay=0.1, fused=True).step
        return torch.optim.SGD([w], lr=1e-3, momentum=0.9, fused=True).step

    if adamw:
        c.outputs = O.opt_step_adamw(
            w, m, v, g, schedule, factor, beta1=0.9, beta2=0.999, eps=1e-8, decay=0.1
        )
    else:
        c.outputs = O.opt_step_sgd(w, m, g, schedule, factor, momentum=0.9, decay=0.1)
    c.peer, c.floor = peer, "copy 0.7" if adamw else ""
    return c


@case("soft_max", "soft_max_back")
def softmax(c: Case, name: str) -> Case:
    """Build softmax."""
    back = name.endswith("back")
    x = c.x(ROWS, WIDTH)

    def peer(torch: Any, leaves: list[Any]) -> Callable[[], Any]:
        if not back:
            return lambda: torch.softmax(leaves[0], -1)
        return backward_pass(torch, torch.softmax(*require_grad(leaves[0]), -1), leaves[:1], leaves[1])

    c.outputs = [O.soft_max_back(c.x(ROWS, WIDTH), x) if back else O.soft_max(x)]
    c.peer = peer
    return c


@case("cross_entropy_loss", "cross_entropy_loss_back")
def loss(c: Case, name: str) -> Case:
    """Build cross entropy."""
    rows, words = 512, 32000
    back = name.endswith("back")
    x, targets = c.x(rows, words), c.ids(words, rows)
    weights = c.leaf(np.full(rows, 1 / rows, np.float32))

    def peer(torch: Any, leaves: list[Any]) -> Callable[[], Any]:
        x, targets = leaves[0], leaves[1].long()
        if not back:
            return lambda: torch.nn.functional.cross_entropy(x, targets)
        return backward_pass(torch, torch.nn.functional.cross_entropy(*require_grad(x), targets), [x], None)

    dloss = c.leaf(np.ones((), np.float32))
    c.outputs = [
        O.cross_entropy_loss_back(dloss, x, targets, weights)
        if back
        else O.cross_entropy_loss(x, targets, weights)
    ]
    c.shape, c.peer, c.tolerance = f"{rows} x {words}", peer, 1e-4
    return c


@case("get_rows", "get_rows_back", "set_rows")
def embedding_rows(c: Case, name: str) -> Case:
    """Build reads and writes of a table's rows."""
    words, width, n = 32000, 512, 16384
    c.shape = f"{words} x {width}, {n} rows"
    if name == "get_rows_back":
        dy, ids = c.x(n, width), c.ids(words, n)
        c.outputs = [O.get_rows_back(dy, ids, rows=words)]
        c.peer = lambda torch, leaves: lambda: torch.zeros(words, width).index_add_(0, leaves[1], leaves[0])
        return c
    w, ids = c.x(words, width), c.leaf(c.random.permutation(words)[:n].astype(np.int32), I32)
    if name == "get_rows":
        c.outputs, c.peer = [O.get_rows(w, ids)], lambda torch, leaves: lambda: leaves[0][leaves[1]]
    else:
        c.outputs = [O.set_rows(w, c.x(n, width), ids, into=True)]
        c.peer = lambda torch, leaves: lambda: leaves[0].index_copy_(0, leaves[1].long(), leaves[2])
    return c


@case("opt_rows", "opt_sum_sqr")
def row_gradients(c: Case, name: str) -> Case:
    """Build gradients of a table of which a batch uses few rows."""
    words, width, n = 32000, 512, 2048
    c.shape = f"{words} x {width}, {n} rows"
    ids = c.ids(words, n)
    rows, places = O.opt_rows(c.x(n, width), ids, rows=words)
    c.outputs = [rows, places] if name == "opt_rows" else [O.opt_sum_sqr(rows, places)]
    return c


# op, its number of arrays of 64 MB each, and the same in torch
ELEMENTS: dict[str, tuple[Callable[..., Tensor], int, Callable[..., Any]]] = {
    "add": (O.add, 2, lambda torch, a, b: a + b),
    "mul": (O.mul, 2, lambda torch, a, b: a * b),
    "scale": (lambda x: O.scale(x, by=0.5), 1, lambda torch, a: a * 0.5),
    "cast": (lambda x: O.cast(x, dtype=BF16), 1, lambda torch, a: a.bfloat16()),
    "silu": (O.silu, 1, lambda torch, a: torch.nn.functional.silu(a)),
    "silu_back": (O.silu_back, 2, lambda torch, a, b: torch.ops.aten.silu_backward(a, b)),
    "sum": (O.sum, 1, lambda torch, a: a.sum()),
    "sum_sqr": (O.sum_sqr, 1, lambda torch, a: torch.dot(a.view(-1), a.view(-1))),
}


def elementwise(c: Case, name: str) -> Case:
    """Build an elementwise op."""
    make, count, peer = ELEMENTS[name]
    c.outputs = [make(*(c.x(ROWS, WIDTH) for _ in range(count)))]
    c.peer = lambda torch, leaves: lambda: peer(torch, *leaves)
    c.tolerance = 2e-2 if name == "cast" else 1e-4
    return c


for op_name in ELEMENTS:
    CASES[op_name] = partial(elementwise, name=op_name)
