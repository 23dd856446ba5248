"""What the ops of `graph/ops/norm.py` do to arrays, in the same order."""

import numpy as np

from llamatrain.kernels.reference.registry import kernel


def root_mean_square(x, eps):
    return np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(eps))


@kernel
def rms_norm(x, w, *, eps):
    return x / root_mean_square(x, eps) * w


@kernel
def rms_norm_back(dy, x, w, *, eps):
    rms = root_mean_square(x, eps)
    normal, dnormal = x / rms, dy * w
    dx = (dnormal - normal * np.mean(dnormal * normal, axis=-1, keepdims=True)) / rms
    return dx, np.sum((dy * normal).reshape(-1, x.shape[-1]), axis=0)


@kernel
def norm(x, *, eps):
    middle = x - np.mean(x, axis=-1, keepdims=True)
    return middle / root_mean_square(middle, eps)


@kernel
def norm_back(dy, x, *, eps):
    middle = x - np.mean(x, axis=-1, keepdims=True)
    size = root_mean_square(middle, eps)
    normal = middle / size
    return (
        dy - np.mean(dy, axis=-1, keepdims=True) - normal * np.mean(dy * normal, axis=-1, keepdims=True)
    ) / size
