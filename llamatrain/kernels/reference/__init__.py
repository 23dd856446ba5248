"""The definition of every op in plain numpy, in the precision of its sources.

A kernel takes the sources' arrays and the node's attributes, and returns the outputs. bfloat16 arrays are
uint16. Files have the names of those in `graph/ops`; importing them registers their kernels.
"""

from importlib import import_module
from pkgutil import iter_modules

from llamatrain.kernels.reference.registry import KERNELS, run_kernel

__all__ = ["KERNELS", "run_kernel"]

for each in iter_modules(__path__, f"{__name__}."):
    import_module(each.name)
