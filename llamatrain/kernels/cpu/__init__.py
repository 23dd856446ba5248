"""The compiled kernels, by the names of the ops they override. What is not here is done by its plain definition."""

from llamatrain.kernels.cpu import attention, elementwise, gates, head, norm, optimizer, products, rope, rows, softmax, sums
from llamatrain.kernels.cpu.binding import BINDINGS

__all__ = ["BINDINGS", "attention", "elementwise", "gates", "head", "norm", "optimizer", "products", "rope", "rows", "softmax", "sums"]
