"""Matrix products.

y = x wᵀ, dx = dy w and dw = dyᵀ x are the three products of a linear layer; each is the gradient of the
others. y may have a bias, a number for each column, in y's precision. Axes before the last two broadcast. If
one source is bf16, the other is rounded to it; the result is in full precision. w may be quantized: then it
is decoded to float32, and frozen.
"""

from llamatrain.graph.ops.reduce import sum_to
from llamatrain.graph.ops.shape_rules import FUSED, broadcast, floats, require
from llamatrain.graph.tensor import BF16, F32, Node, QuantizedType, Spec, Tensor, gradient, op


def product(a: Spec, b: Spec, rows: int, columns: int, shared: tuple[int, int]) -> Spec:
    """Return the spec of a product of matrices."""
    require(len(a.shape) >= 2 and len(b.shape) >= 2, "needs matrices")
    require(shared[0] == shared[1], f"{shared[0]} does not match {shared[1]}")
    if isinstance(b.dtype, QuantizedType):
        require(len(b.shape) == 2, "takes no stack of quantized matrices; expert_matmul does")
        dtype = F32 if a.dtype is BF16 else floats(a)
    else:
        dtype = F32 if BF16 in (a.dtype, b.dtype) and {a.dtype, b.dtype} <= {BF16, F32} else floats(a, b)
    return Spec((*broadcast(a.shape[:-2], b.shape[:-2]), rows, columns), dtype)


@op(quantized_source=1, rounded_sources=(0, 1), bf16_outputs=(0,))
def matmul(x: Spec, w: Spec, bias: Spec | None = None) -> Spec:
    """Return x wᵀ plus the bias in each row: (m, k), (n, k), (n,) -> (m, n)."""
    require(min(len(x.shape), len(w.shape)) >= 2, "needs matrices")
    made = product(x, w, x.shape[-2], w.shape[-2], (x.shape[-1], w.shape[-1]))
    if bias is not None:
        require(
            bias.shape == made.shape[-1:] and bias.dtype is made.dtype,
            f"needs a bias {made.dtype}{[made.shape[-1]]}",
        )
    return made


@gradient(matmul)
def _(node: Node, dy: Tensor):
    x, w, *bias = node.sources
    return matmul_nn(dy, w), out_prod(dy, x), *(sum_to(dy, each.shape) for each in bias)


@op(quantized_source=1, rounded_sources=(0, 1), bf16_outputs=(0,))
def matmul_nn(y: Spec, w: Spec) -> Spec:
    """Return y w: (m, n), (n, k) -> (m, k)."""
    require(min(len(y.shape), len(w.shape)) >= 2, "needs matrices")
    return product(y, w, y.shape[-2], w.shape[-1], (y.shape[-1], w.shape[-2]))


@gradient(matmul_nn)
def _(node: Node, dx: Tensor):
    y, w = node.sources
    return matmul(dx, w), out_prod(y, dx)


@op(in_place=((0, 0),), quantized_source=2, no_gradient=FUSED, bf16_sources=(0,), bf16_outputs=(0,))
def matmul_add(y: Spec, x: Spec, w: Spec) -> Spec:
    """Return y + x wᵀ: (m, n), (m, k), (n, k) -> (m, n)."""
    (made,) = matmul.infer_specs(x, w)
    require(y == made and len(y.shape) == 2, "needs y like the product of two matrices")
    return y


@op(in_place=((0, 0),), quantized_source=2, no_gradient=FUSED, bf16_sources=(0,), bf16_outputs=(0,))
def matmul_nn_add(y: Spec, x: Spec, w: Spec) -> Spec:
    """Return y + x w: (m, k), (m, n), (n, k) -> (m, k)."""
    (made,) = matmul_nn.infer_specs(x, w)
    require(y == made and len(y.shape) == 2, "needs y like the product of two matrices")
    return y


@op(rounded_sources=(0, 1))
def out_prod(a: Spec, b: Spec) -> Spec:
    """Return aᵀ b: (t, n), (t, k) -> (n, k)."""
    require(min(len(a.shape), len(b.shape)) >= 2, "needs matrices")
    return product(a, b, a.shape[-1], b.shape[-1], (a.shape[-2], b.shape[-2]))


@gradient(out_prod)
def _(node: Node, d: Tensor):
    a, b = node.sources
    return matmul(b, d), matmul_nn(a, d)
