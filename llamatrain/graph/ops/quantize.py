"""Rounding to the quantized types of GGUF files, for quantization-aware training.

The derivative of rounding is 0 almost everywhere. The straight-through estimator (Bengio et al. 2013) takes the
gradient of the rounded weight for that of the weight.
"""

from llamatrain.graph.ops.shape_rules import floats, require
from llamatrain.graph.tensor import Node, Spec, Tensor, gradient, op, quantized


@op()
def fake_quantize(w: Spec, *, kind: str) -> Spec:
    """Return w as it is after it was encoded as a type, such as "Q4_0", and decoded again."""
    block = quantized(kind).kind.block_size
    require(w.shape != () and w.shape[-1] % block == 0, f"needs rows of whole {kind} blocks of {block}")
    return Spec(w.shape, floats(w))


@gradient(fake_quantize)
def _(node: Node, dy: Tensor):
    return (dy,)
