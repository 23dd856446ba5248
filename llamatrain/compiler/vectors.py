"""Vectors, as bodies of kernels name what they do with them; what that is the compiler knows (`compiler/simd`)."""

from functools import partial
from importlib import import_module
from typing import Any

from llamatrain.compiler.declare import LazyCompiled, LazyModule
from llamatrain.platform.cpu import vector_width

LANES = vector_width()
VECTORS = "llamatrain.compiler.simd"


def named(module: str, *names: str) -> list[Any]:
    """What a module has by these names, when they are asked for."""
    return [LazyCompiled(partial(_found, module, name)) for name in names]


def _found(module: str, name: str) -> Any:
    return getattr(import_module(f"{VECTORS}.{module}"), name)


load, store, load_to, store_to = named("memory", "load", "store", "load_to", "store_to")
splat, total, largest, larger = named("vector", "splat", "total", "largest", "larger")
exp, tanh, sqrt = named("vector", "exp", "tanh", "sqrt")
otherwise, within, between = named("vector", "otherwise", "within", "between")
evens, odds, swapped, alternate = named("vector", "evens", "odds", "swapped", "alternate")
to_bf16, from_bf16 = named("vector", "to_bf16", "from_bf16")
sixteen = LazyModule(f"{VECTORS}.vec16")
