"""Runs Triton kernels where they can be compiled; torch's own ops do the same work elsewhere."""

import os
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from llamatrain.platform.terminal import log_line

INTERPRETER = "TRITON_INTERPRET"  # set: Triton's kernels run on the CPU, very slowly
failed: set[str] = set()  # kernels that could not be compiled or launched


@cache
def load_kernels(device_type: str) -> ModuleType | None:
    """Return the module of Triton kernels, or None if the device or the installation has no Triton."""
    if device_type not in ("cuda", "xpu") and not os.environ.get(INTERPRETER):
        return None
    if find_spec("triton") is None:
        return None
    from llamatrain.kernels.torch import triton_ops

    return triton_ops


def is_supported(tensor: Tensor) -> bool:
    """Return True if Triton kernels read and write a tensor."""
    return tensor.is_contiguous() and tensor.dtype is not torch.float64


def run_fast(name: str, *tensors: Tensor, **settings: float) -> bool:
    """Run a Triton kernel and return True, or return False if torch has to do the work."""
    kernels = load_kernels(tensors[0].device.type)
    if not kernels or name in failed or not all(is_supported(tensor) for tensor in tensors):
        return False
    try:
        getattr(kernels, name)(*tensors, **settings)
    except Exception as error:
        failed.add(name)
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        log_line(f"Triton cannot run {name} here, so torch does, a little slower: {reason[:120]}")
        return False
    return True
