"""Lists all declared functions."""

from collections.abc import Iterator
from importlib import import_module
from pkgutil import walk_packages

from llamatrain.compiler.declare import Compilable

# Other packages are not imported: one of them needs mpi4py, which is optional.
DECLARING_PACKAGES = ("data.tokenizer", "gguf.quants", "kernels", "compiler.thread_pool")


def kernel_modules() -> Iterator[str]:
    """Yield the names of modules that may declare kernels."""
    for name in DECLARING_PACKAGES:
        module = import_module(f"llamatrain.{name}")
        yield module.__name__
        for info in walk_packages(getattr(module, "__path__", ()), f"{module.__name__}."):
            # code for LLVM and kernels in PyTorch declare nothing, and need what may not be installed
            if not {"llvm", "torch"} & {*info.name.split(".")}:
                yield info.name


def list_compilables() -> list[Compilable]:
    """Return all declared functions, sorted by name."""
    every = (value for name in kernel_modules() for value in vars(import_module(name)).values())
    by_name = {each.qualified_name: each for each in every if isinstance(each, Compilable)}
    return [by_name[where] for where in sorted(by_name)]
