"""Reference kernels of `graph/ops/int8.py`, in the same order.

Both sources of a product are rounded to integers in blocks of BLOCK elements along k, the axis that the product
sums over; each block of each row has a scale of its own:

    activations    the largest magnitude becomes 127
    weights        the largest sum of four magnitudes becomes 126: of elements 0, 1, 4 and 5 and of 2, 3, 6 and 7
                   of each eight, whose products are added together

An activation is stored with 128 added, as an unsigned byte. Then a sum of four products is within ±32,640 and fits
16 bits, so that processors that add products in 16 bits give exact results, too. A weight has about seven bits
of precision. Integers are summed exactly; then each block's sum is multiplied by the scale of the activations and
by that of the weight, and added in float32, block after block. Every processor gives these bits.

A block whose largest value is below SMALLEST counts as zero. A block with an infinity or NaN, or with a sum of
magnitudes that is infinite, has the scale NaN.
"""

import numpy as np

from llamatrain.kernels.quantized import Blocks
from llamatrain.kernels.reference.dropout import mix_bits
from llamatrain.kernels.reference.experts import expert_places, expert_weight, sorted_rows
from llamatrain.kernels.reference.registry import from_bf16, kernel

BLOCK = 256  # elements along k that share a scale
LARGEST = 127  # magnitude of an activation's integer
LARGEST_SUM = 126  # of four magnitudes before rounding, which adds at most 2
SMALLEST = 2.0**-120  # smaller blocks have no finite reciprocal
STEP = np.uint32(0x9E3779B9)


def split_blocks(x: np.ndarray) -> np.ndarray:
    """Return the rows of a matrix in blocks, the last of which is filled with zeros."""
    rows, k = x.shape
    count = -(-k // BLOCK)
    padded = np.zeros((rows, count * BLOCK), np.float32)
    padded[:, :k] = x
    return padded.reshape(rows, count, BLOCK)


def scales(largest: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the scale of each block, and what its elements are multiplied by before rounding."""
    is_zero, is_finite = largest < np.float32(SMALLEST), np.isfinite(largest)
    safe = np.where(is_zero | ~is_finite, np.float32(1), largest)
    scale = np.where(
        is_finite, np.where(is_zero, np.float32(0), safe / np.float32(limit)), np.float32(np.nan)
    )
    return scale, np.where(is_zero | ~is_finite, np.float32(0), np.float32(limit) / safe)


def finite_products(blocks: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Return the elements of blocks times the factor of each; 0 where the factor is."""
    return np.where(factors[..., None] == 0, np.float32(0), blocks * factors[..., None])


def round_activations(x: np.ndarray, at_random: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the integers of each block, and the scales."""
    blocks = split_blocks(x)
    largest = abs(blocks).max(-1)
    scale, factors = scales(largest, LARGEST)
    values = finite_products(blocks, factors)
    if not at_random:
        return np.rint(values), scale
    below = np.floor(values)  # what is left is exact, and so is the mean of what is drawn
    rounded = below + np.floor((values - below) + draw_fractions(largest))
    return np.minimum(rounded, np.float32(LARGEST)), scale


def draw_fractions(largest: np.ndarray) -> np.ndarray:
    """Return a number from 0 to 1 for each element, a hash of its row, its column and its block's largest value.

    Nothing is drawn in order, so that a step that is repeated draws the same numbers.
    """
    rows, count = largest.shape
    seeds = mix_bits(largest.view(np.uint32)) + np.arange(rows, dtype=np.uint32)[:, None]
    columns = np.arange(count * BLOCK, dtype=np.uint32).reshape(count, BLOCK)
    drawn = mix_bits(columns * STEP + mix_bits(seeds)[..., None])
    return (drawn >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def round_weight(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the integers of each block of rows of a weight, and the scales."""
    blocks = split_blocks(w)
    by_eight = abs(blocks).reshape(*blocks.shape[:2], -1, 2, 2, 2)  # (..., eights, halves, pairs, two)
    by_four = by_eight[..., 0, :, :] + by_eight[..., 1, :, :]
    largest = (by_four[..., 0] + by_four[..., 1]).max((-1, -2))
    scale, factors = scales(largest, LARGEST_SUM)
    return np.rint(finite_products(blocks, factors)), scale


def multiply_rounded(x: np.ndarray, w: np.ndarray, at_random: bool) -> np.ndarray:
    """Return x wᵀ of float32 matrices, both rounded along their last axis."""
    return add_blocks(*round_activations(x, at_random), w)


def add_blocks(a: np.ndarray, a_scale: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Return the product of rounded rows and a weight, whose blocks are added up in float32."""
    b, b_scale = round_weight(w)
    y = np.zeros((len(a), len(w)), np.float32)
    for block in range(a.shape[1]):
        sums = a[:, block] @ b[:, block].T  # exact: no sum exceeds 2^24
        y += sums * a_scale[:, block, None] * b_scale[:, block]
    return y


def to_float32(source: np.ndarray | Blocks) -> np.ndarray:
    """Return a source of a product in float32."""
    array = source.decode_rows() if isinstance(source, Blocks) else source
    return from_bf16(array) if array.dtype == np.uint16 else array


@kernel
def matmul_int8(x, w, bias=None):
    """Return x wᵀ plus the bias in each row; x and w are rounded to 8 bits."""
    x, w = to_float32(x), to_float32(w)
    y = multiply_rounded(x.reshape(-1, x.shape[-1]), w, False).reshape(*x.shape[:-1], len(w))
    return y if bias is None else y + bias


@kernel
def matmul_nn_int8(y, w):
    """Return y w; w is rounded to 8 bits, and y is rounded up or down at random."""
    y, w = to_float32(y), to_float32(w)
    x = multiply_rounded(y.reshape(-1, y.shape[-1]), w.T, True)
    return x.reshape(*y.shape[:-1], w.shape[1])


def multiply_choices(x, w, order, ends, across):
    """Return each choice times the weight of its expert; `across` also says that choices are rounded at random."""
    a, a_scale = round_activations(to_float32(sorted_rows(x, order)), across)
    out = np.zeros((order.size, w.shape[2 if across else 1]), np.float32)
    for expert, places in enumerate(expert_places(ends)):
        if places.stop > places.start:
            weight = to_float32(expert_weight(w, expert))
            out[places] = add_blocks(a[places], a_scale[places], weight.T if across else weight)
    return out.reshape(*order.shape, -1)


@kernel
def expert_matmul_int8(x, w, order, ends):
    """Return each choice times the weight of its expert, x wᵀ; both are rounded to 8 bits."""
    return multiply_choices(x, w, order, ends, False)


@kernel
def expert_matmul_nn_int8(y, w, order, ends):
    """Return each choice times the weight of its expert, y w; w is rounded to 8 bits, and y at random."""
    return multiply_choices(y, w, order, ends, True)
