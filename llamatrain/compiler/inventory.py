"""All functions that are compiled, wherever they are declared."""

from collections.abc import Iterator
from importlib import import_module
from pkgutil import walk_packages

from llamatrain.compiler.declare import Compilable

# Where kernels are declared. Other modules are not imported: one of them needs mpi4py, which need not be installed.
DECLARING_PACKAGES = ("data.tokenizer", "gguf.quants", "kernels", "compiler.thread_pool")


def kernel_modules() -> Iterator[str]:
    """Name the modules that may declare kernels."""
    for name in DECLARING_PACKAGES:
        module = import_module(f"llamatrain.{name}")
        yield module.__name__
        for info in walk_packages(getattr(module, "__path__", ()), f"{module.__name__}."):
            if "llvm" not in info.name.split("."):  # it builds kernels with the compiler, and declares none
                yield info.name


def list_compilables() -> list[Compilable]:
    every = (value for name in kernel_modules() for value in vars(import_module(name)).values())
    by_name = {each.qualified_name: each for each in every if isinstance(each, Compilable)}
    return [by_name[where] for where in sorted(by_name)]
