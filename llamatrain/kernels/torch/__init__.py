"""Kernels in PyTorch, for graphics processors and for torch's own CPU device.

Only `engine.device` imports this package, and only if such a device was asked for.
"""

GPUS = ("cuda", "xpu", "mps")  # torch's names; AMD's cards are "cuda" there
