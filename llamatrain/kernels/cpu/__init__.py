"""The compiled kernels by op name. Ops without one use the reference kernel.

Importing the modules of this folder registers their kernels.
"""

from importlib import import_module
from pkgutil import iter_modules

from llamatrain.kernels.cpu.registry import BINDINGS

__all__ = ["BINDINGS"]

for each in iter_modules(__path__, f"{__name__}."):
    import_module(each.name)
