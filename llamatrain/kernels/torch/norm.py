"""Torch kernels of norms and of the softmax."""

import torch
from torch import Tensor

from llamatrain.kernels.torch.elementwise import Outs, several_results
from llamatrain.kernels.torch.fast import run_fast
from llamatrain.kernels.torch.registry import kernel, writing_kernel


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(mean(x²) + eps) of each row."""
    squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
    return squares.div_(x.shape[-1]).add_(eps).rsqrt_()


def sum_over_rows(x: Tensor) -> Tensor:
    """Return the sum of all rows."""
    return x.reshape(-1, x.shape[-1]).sum(dim=0)


@writing_kernel(several_results)
def rms_norm(x: Tensor, w: Tensor, *, eps: float, out: Outs) -> None:
    """Write x / rms(x) · w."""
    if not run_fast("rms_norm", x, w, out[0], eps=eps):
        torch.mul(x * inverse_rms(x, eps), w, out=out[0])


@writing_kernel(several_results)
def rms_norm_back(dy: Tensor, x: Tensor, w: Tensor, *, eps: float, out: Outs) -> None:
    """Write the gradients of x and w."""
    if run_fast("rms_norm_back", dy, x, w, *out, eps=eps):
        return
    inverse = inverse_rms(x, eps)
    normal = x * inverse
    dw = sum_over_rows(dy * normal)
    dx = dy * w
    mean = torch.mean(dx * normal, dim=-1, keepdim=True)
    torch.mul(dx.addcmul_(normal, mean, value=-1), inverse, out=out[0])
    out[1].copy_(dw)


def normed(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x with mean 0 and deviation 1, and the inverse of its deviation."""
    middle = x - x.mean(dim=-1, keepdim=True)
    inverse = inverse_rms(middle, eps)
    return middle.mul_(inverse), inverse


def norm_gradient(dy: Tensor, normal: Tensor, inverse: Tensor) -> Tensor:
    """Return the gradient of what was normed."""
    mean = torch.mean(dy * normal, dim=-1, keepdim=True)
    return (dy - dy.mean(dim=-1, keepdim=True)).addcmul_(normal, mean, value=-1).mul_(inverse)


@kernel(several_results)
def layer_norm(x: Tensor, w: Tensor, bias: Tensor | None = None, *, eps: float) -> Tensor:
    """Return norm(x) · w, plus the bias in each row."""
    y = normed(x, eps)[0].mul_(w)
    return y if bias is None else y.add_(bias)


@kernel(several_results)
def layer_norm_back(dy: Tensor, x: Tensor, w: Tensor, *, eps: float) -> Outs:
    """Return the gradients of x and w."""
    normal, inverse = normed(x, eps)
    return norm_gradient(dy * w, normal, inverse), sum_over_rows(dy * normal)


@kernel(several_results)
def norm(x: Tensor, *, eps: float) -> Tensor:
    """Return x with mean 0 and deviation 1."""
    return normed(x, eps)[0]


@kernel(several_results)
def norm_back(dy: Tensor, x: Tensor, *, eps: float) -> Tensor:
    """Return the gradient of x."""
    return norm_gradient(dy, *normed(x, eps))


@writing_kernel()
def soft_max(x: Tensor, *, out: Outs) -> None:
    """Write the softmax of x."""
    torch.softmax(x, dim=-1, out=out[0])


@kernel(several_results)
def soft_max_back(dy: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of x, given the output y."""
    return (dy - torch.sum(dy * y, dim=-1, keepdim=True)).mul_(y)
