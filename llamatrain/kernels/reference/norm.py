"""Reference kernels of `graph/ops/norm.py`, in the same order."""

import numpy as np

from llamatrain.kernels.reference.registry import kernel


def root_mean_square(x, eps):
    """Return sqrt(mean(x²) + eps) of each row."""
    return np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(eps))


@kernel
def rms_norm(x, w, *, eps):
    """Return x / rms(x) · w."""
    return x / root_mean_square(x, eps) * w


@kernel
def rms_norm_back(dy, x, w, *, eps):
    """Return the gradients of x and w."""
    rms = root_mean_square(x, eps)
    normal, dnormal = x / rms, dy * w
    dx = (dnormal - normal * np.mean(dnormal * normal, axis=-1, keepdims=True)) / rms
    return dx, np.sum((dy * normal).reshape(-1, x.shape[-1]), axis=0)


@kernel
def layer_norm(x, w, bias=0, *, eps):
    """Return norm(x) · w, plus the bias in each row."""
    return norm(x, eps=eps) * w + bias


@kernel
def layer_norm_back(dy, x, w, *, eps):
    """Return the gradients of x and w."""
    normal = norm(x, eps=eps)
    return norm_back(dy * w, x, eps=eps), np.sum((dy * normal).reshape(-1, x.shape[-1]), axis=0)


@kernel
def norm(x, *, eps):
    """Return the normed x, with mean 0 and deviation 1."""
    middle = x - np.mean(x, axis=-1, keepdims=True)
    return middle / root_mean_square(middle, eps)


@kernel
def norm_back(dy, x, *, eps):
    """Return the gradient of x."""
    middle = x - np.mean(x, axis=-1, keepdims=True)
    size = root_mean_square(middle, eps)
    normal = middle / size
    return (
        dy - np.mean(dy, axis=-1, keepdims=True) - normal * np.mean(dy * normal, axis=-1, keepdims=True)
    ) / size
