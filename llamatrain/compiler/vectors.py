"""Vector operations by the names that kernel bodies use; `compiler/simd` implements them."""

from functools import partial
from importlib import import_module
from typing import Any

from llamatrain.compiler.declare import LazyCompiled, LazyModule
from llamatrain.platform.cpu import vector_width

LANES = vector_width()
VECTORS = "llamatrain.compiler.simd"


def lazy_names(module: str, *names: str) -> list[Any]:
    """Return the names of a module of `simd`, imported on first use."""
    return [LazyCompiled(partial(_import_name, module, name)) for name in names]


def _import_name(module: str, name: str) -> Any:
    return getattr(import_module(f"{VECTORS}.{module}"), name)


load, store, load_until, store_until = lazy_names("memory", "load", "store", "load_until", "store_until")
splat, reduce_sum, reduce_max, maximum = lazy_names("vector", "splat", "reduce_sum", "reduce_max", "maximum")
exp, tanh, sqrt = lazy_names("vector", "exp", "tanh", "sqrt")
where_nonzero, mask_range, where_between = lazy_names(
    "vector", "where_nonzero", "mask_range", "where_between"
)
duplicate_even, duplicate_odd, swap_pairs, negate_even = lazy_names(
    "vector", "duplicate_even", "duplicate_odd", "swap_pairs", "negate_even"
)
to_bf16, from_bf16 = lazy_names("vector", "to_bf16", "from_bf16")
vec16 = LazyModule(f"{VECTORS}.vec16")
