"""The compiled kernels, by the names of the ops they override. What is not here is done by its plain definition."""

from llamatrain.kernels.cpu import (  # noqa: F401  imported for what they register
    attention,
    dropout,
    elementwise,
    gates,
    head,
    norm,
    optimizer,
    products,
    rope,
    rows,
    softmax,
    sums,
)
from llamatrain.kernels.cpu.binding import BINDINGS

__all__ = ["BINDINGS"]
