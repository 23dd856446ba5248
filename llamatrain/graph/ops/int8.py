"""Products with frozen weights in 8-bit integers (`kernels/reference/int8.py` defines the rounding).

`graph/int8.py` puts them in the place of other products after gradients were derived.
"""

from llamatrain.graph.ops.experts import expert_matmul, expert_matmul_nn
from llamatrain.graph.ops.matmul import matmul, matmul_nn
from llamatrain.graph.ops.shape_rules import require
from llamatrain.graph.tensor import F32, PackedType, Spec, op

REPLACES = "it replaces a product whose gradient exists already (graph/int8.py)"


def unpacked(w: Spec) -> Spec:
    """Return the spec of a weight, or of what was packed."""
    return Spec(w.shape, F32) if isinstance(w.dtype, PackedType) else w


@op(quantized_source=1, rounded_sources=(0,), no_gradient=REPLACES)
def matmul_int8(x: Spec, w: Spec, bias: Spec | None = None) -> Spec:
    """Return x wᵀ plus the bias in each row; x and w are rounded to 8 bits."""
    (made,) = matmul.infer_specs(x, unpacked(w), *(() if bias is None else (bias,)))
    require(len(w.shape) == 2 and made.dtype is F32, "needs float32 or bfloat16, and one weight")
    return made


@op(quantized_source=1, rounded_sources=(0,), no_gradient=REPLACES)
def matmul_nn_int8(y: Spec, w: Spec) -> Spec:
    """Return y w; w is rounded to 8 bits, and y is rounded up or down at random."""
    (made,) = matmul_nn.infer_specs(y, unpacked(w))
    require(len(w.shape) == 2 and made.dtype is F32, "needs float32 or bfloat16, and one weight")
    return made


@op(quantized_source=1, rounded_sources=(0,), no_gradient=REPLACES)
def expert_matmul_int8(x: Spec, w: Spec, order: Spec, ends: Spec) -> Spec:
    """Return each choice times the weight of its expert, x wᵀ; both are rounded to 8 bits."""
    (made,) = expert_matmul.infer_specs(x, w, order, ends)
    require(made.dtype is F32, "needs float32 or bfloat16")
    return made


@op(quantized_source=1, rounded_sources=(0,), no_gradient=REPLACES)
def expert_matmul_nn_int8(y: Spec, w: Spec, order: Spec, ends: Spec) -> Spec:
    """Return each choice times the weight of its expert, y w; w is rounded to 8 bits, and y at random."""
    (made,) = expert_matmul_nn.infer_specs(y, w, order, ends)
    require(made.dtype is F32, "needs float32 or bfloat16")
    return made
