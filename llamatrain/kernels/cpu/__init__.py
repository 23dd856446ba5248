"""The compiled kernels, by the names of the ops they override. What is not here is done by its plain definition.

Each file of the folder is imported, for what it registers.
"""

from importlib import import_module
from pkgutil import iter_modules

from llamatrain.kernels.cpu.registry import BINDINGS

__all__ = ["BINDINGS"]

for each in iter_modules(__path__, f"{__name__}."):
    import_module(each.name)
