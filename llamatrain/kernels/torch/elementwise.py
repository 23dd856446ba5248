"""Torch kernels of arithmetic, activations and gates, and of the further ops of ggml."""

import torch
from torch import Tensor
from torch.nn import functional

from llamatrain.graph.ops.activations import A, B
from llamatrain.graph.ops.log_prob import MAX_LOG_PROB
from llamatrain.graph.tensor import Node
from llamatrain.kernels.torch.fast import run_fast
from llamatrain.kernels.torch.registry import kernel, result_bytes, writing_kernel

aten = torch.ops.aten
Outs = tuple[Tensor, ...]


def several_results(node: Node) -> int:
    """Return the bytes of the results and of as many intermediate values in float32."""
    return 2 * result_bytes(node) + 8 * sum(output.size for output in node.outputs)


def copy_unless_same(x: Tensor, place: Tensor) -> None:
    """Copy x to its place, unless it is there."""
    if x.data_ptr() != place.data_ptr():
        place.copy_(x)


# ---- arithmetic ------------------------------------------------------------


@writing_kernel()
def add(a: Tensor, b: Tensor, *, out: Outs) -> None:
    """Write a + b."""
    torch.add(a, b, out=out[0])


@writing_kernel()
def sub(a: Tensor, b: Tensor, *, out: Outs) -> None:
    """Write a - b."""
    torch.sub(a, b, out=out[0])


@writing_kernel()
def mul(a: Tensor, b: Tensor, *, out: Outs) -> None:
    """Write a · b."""
    torch.mul(a, b, out=out[0])


@writing_kernel()
def div(a: Tensor, b: Tensor, *, out: Outs) -> None:
    """Write a / b."""
    torch.div(a, b, out=out[0])


@writing_kernel()
def scale(x: Tensor, *, by: float, out: Outs) -> None:
    """Write x times a constant."""
    torch.mul(x, by, out=out[0])


@writing_kernel()
def sqr(x: Tensor, *, out: Outs) -> None:
    """Write x²."""
    torch.mul(x, x, out=out[0])


@writing_kernel()
def add1(a: Tensor, b: Tensor, *, out: Outs) -> None:
    """Write a plus the one number in b."""
    torch.add(a, b.reshape(()), out=out[0])


@writing_kernel()
def neg(x: Tensor, *, out: Outs) -> None:
    """Write -x."""
    torch.neg(x, out=out[0])


@writing_kernel()
def abs(x: Tensor, *, out: Outs) -> None:
    """Write the absolute value of x."""
    torch.abs(x, out=out[0])


@writing_kernel()
def sgn(x: Tensor, *, out: Outs) -> None:
    """Write the sign of x."""
    torch.sign(x, out=out[0])


@writing_kernel()
def sqrt(x: Tensor, *, out: Outs) -> None:
    """Write the square root of x."""
    torch.sqrt(x, out=out[0])


@writing_kernel()
def log(x: Tensor, *, out: Outs) -> None:
    """Write the natural logarithm of x."""
    torch.log(x, out=out[0])


@writing_kernel()
def exp(x: Tensor, *, out: Outs) -> None:
    """Write e to the power of x."""
    torch.exp(x, out=out[0])


@writing_kernel()
def sin(x: Tensor, *, out: Outs) -> None:
    """Write the sine of x."""
    torch.sin(x, out=out[0])


@writing_kernel()
def cos(x: Tensor, *, out: Outs) -> None:
    """Write the cosine of x."""
    torch.cos(x, out=out[0])


# ---- activations -----------------------------------------------------------


@kernel()
def step(x: Tensor) -> Tensor:
    """Return 1 where x is above 0, else 0."""
    return x > 0


@writing_kernel()
def relu(x: Tensor, *, out: Outs) -> None:
    """Write max(x, 0)."""
    torch.clamp(x, min=0, out=out[0])


@kernel(several_results)
def relu_sqr(x: Tensor) -> Tensor:
    """Return max(x, 0)²."""
    return torch.relu(x).square_()


@kernel(several_results)
def relu_sqr_back(dy: Tensor, x: Tensor) -> Tensor:
    """Return dy times 2 max(x, 0)."""
    return torch.relu(x).mul_(dy).mul_(2)


@writing_kernel()
def sigmoid(x: Tensor, *, out: Outs) -> None:
    """Write 1 / (1 + exp(-x))."""
    torch.sigmoid(x, out=out[0])


@kernel(several_results)
def gelu(x: Tensor) -> Tensor:
    """Return x · sigmoid(A x + B x³)."""
    return torch.sigmoid(x * (A + B * x * x)).mul_(x)


@kernel(several_results)
def gelu_back(dy: Tensor, x: Tensor) -> Tensor:
    """Return dy times the derivative of gelu at x."""
    s = torch.sigmoid(x * (A + B * x * x))
    return (1 - s).mul_(x).mul_(A + 3 * B * x * x).add_(1).mul_(s).mul_(dy)


@kernel(several_results)
def xielu(x: Tensor, *, positive: float, negative: float, beta: float, eps: float) -> Tensor:
    """Return positive x² + beta x above 0, and negative (exp(min(x, eps)) - 1 - x) + beta x elsewhere."""
    bent = torch.where(x > 0, positive * x * x, negative * (torch.expm1(x.clamp(max=eps)) - x))
    return bent.add_(x, alpha=beta)


@kernel(several_results)
def xielu_back(dy: Tensor, x: Tensor, *, positive: float, negative: float, beta: float, eps: float) -> Tensor:
    """Return dy times the derivative of xielu at x."""
    power = torch.where(x < eps, torch.exp(x.clamp(max=0)), 0)
    return torch.where(x > 0, 2 * positive * x, negative * (power - 1)).add_(beta).mul_(dy)


def apply_cap(x: Tensor, cap: float) -> Tensor:
    """Return cap tanh(x / cap), or x if there is no cap."""
    return torch.tanh(x / cap).mul_(cap) if cap else x


@kernel(several_results)
def softcap(x: Tensor, *, cap: float) -> Tensor:
    """Return cap tanh(x / cap)."""
    return apply_cap(x, cap)


@kernel(several_results)
def softcap_back(dy: Tensor, y: Tensor, *, cap: float) -> Tensor:
    """Return dy (1 - (y / cap)²), where y is the output of softcap."""
    return (y / cap).square_().neg_().add_(1).mul_(dy)


# ---- gates -----------------------------------------------------------------


def in_full(x: Tensor) -> Tensor:
    """Return x, in float32 if it is of lower precision."""
    return x.float() if x.dtype is torch.bfloat16 else x


@writing_kernel()
def silu(x: Tensor, *, out: Outs) -> None:
    """Write x · sigmoid(x)."""
    aten.silu.out(x, out=out[0])


@writing_kernel()
def silu_back(dy: Tensor, x: Tensor, *, out: Outs) -> None:
    """Write dy times the derivative of silu at x."""
    aten.silu_backward.grad_input(dy, x, grad_input=out[0])


@kernel(several_results)
def glu(gate: Tensor, up: Tensor) -> Tensor:
    """Return sigmoid(gate) · up."""
    return torch.sigmoid(gate).mul_(up)


@kernel(several_results)
def glu_back(dy: Tensor, gate: Tensor, up: Tensor) -> Outs:
    """Return the gradients of gate and up."""
    s = torch.sigmoid(gate)
    return (1 - s).mul_(s).mul_(up).mul_(dy), s.mul_(dy)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up, computed in float32."""
    return functional.silu(in_full(gate)).mul_(up)


def gate_gradients(dy: Tensor, gate: Tensor, up: Tensor) -> Outs:
    """Return the gradients of gate and up."""
    dy, full = in_full(dy), in_full(gate)
    return aten.silu_backward(dy * up, full), functional.silu(full).mul_(dy)


@writing_kernel(several_results)
def swiglu(gate: Tensor, up: Tensor, *, out: Outs) -> None:
    """Write silu(gate) · up, computed in float32."""
    if not run_fast("swiglu", gate, up, out[0]):
        out[0].copy_(gated(gate, up))


@writing_kernel(several_results)
def swiglu_back(dy: Tensor, gate: Tensor, up: Tensor, *, out: Outs) -> None:
    """Write the gradients of gate and up."""
    if not run_fast("swiglu_back", dy, gate, up, *out):
        for place, grad in zip(out, gate_gradients(dy, gate, up), strict=True):
            place.copy_(grad)


@kernel(several_results)
def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return gelu(gate) · up, computed in float32."""
    return gelu(in_full(gate)).mul_(up)


@kernel(several_results)
def geglu_back(dy: Tensor, gate: Tensor, up: Tensor) -> Outs:
    """Return the gradients of gate and up."""
    dy, full = in_full(dy), in_full(gate)
    return gelu_back(dy * up, full), gelu(full).mul_(dy)


@kernel(several_results)
def reglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return relu(gate) · up, computed in float32."""
    return torch.relu(in_full(gate)).mul_(up)


@kernel(several_results)
def reglu_back(dy: Tensor, gate: Tensor, up: Tensor) -> Outs:
    """Return the gradients of gate and up."""
    dy, full = in_full(dy), in_full(gate)
    return (dy * up).mul_(full > 0), torch.relu(full).mul_(dy)


@kernel(several_results)
def swiglu_halves(x: Tensor) -> Tensor:
    """Return swiglu of the first half of each row, the gate, and the second half."""
    return gated(*x.chunk(2, dim=-1))


@kernel(several_results)
def swiglu_halves_back(dy: Tensor, x: Tensor) -> Tensor:
    """Return both gradients as the halves of each row."""
    return torch.cat(gate_gradients(dy, *x.chunk(2, dim=-1)), dim=-1)


def clip_gates(gate: Tensor, up: Tensor, slope: float, limit: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return clipped gates and ups, and the share that each gate passes."""
    g = gate.clamp(max=limit)
    return g, up.clamp(-limit, limit), (g * slope).sigmoid_()


@kernel(several_results)
def clipped_swiglu(gate: Tensor, up: Tensor, *, slope: float, limit: float) -> Tensor:
    """Return g · sigmoid(slope · g) · (u + 1), with gates up to a limit, and ups within it."""
    g, u, s = clip_gates(gate, up, slope, limit)
    return s.mul_(g).mul_(u.add_(1))


@kernel(several_results)
def clipped_swiglu_back(dy: Tensor, gate: Tensor, up: Tensor, *, slope: float, limit: float) -> Outs:
    """Return the gradients of gate and up, which are zero beyond the limit."""
    g, u, s = clip_gates(gate, up, slope, limit)
    dgate = dy * (u + 1) * s * (1 + g * slope * (1 - s))
    return dgate.mul_(gate <= limit), (dy * g * s).mul_(up.abs() <= limit)


# ---- log probabilities -----------------------------------------------------


@kernel(several_results)
def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x))."""
    return torch.logaddexp(x, torch.zeros_like(x))


@kernel(several_results)
def log_odds(x: Tensor) -> Tensor:
    """Return log(p / (1 - p)) for x = log(p)."""
    x = x.clamp(max=MAX_LOG_PROB)
    return x - torch.log(-torch.expm1(x))


@kernel(several_results)
def log_odds_back(dy: Tensor, x: Tensor) -> Tensor:
    """Return dy times the derivative of log_odds at x."""
    return -dy / torch.expm1(x.clamp(max=MAX_LOG_PROB))


@writing_kernel()
def detached(x: Tensor, *, out: Outs) -> None:
    """Write x."""
    out[0].copy_(x)
