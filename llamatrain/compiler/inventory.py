"""All functions that are compiled, wherever they are declared."""

from collections.abc import Iterator
from importlib import import_module
from pkgutil import walk_packages

from llamatrain.compiler.declare import Compilable

# Where kernels are declared. Other modules are not imported: one of them needs mpi4py, which need not be installed.
DECLARING = ("data.tokenizer", "gguf.quants", "kernels", "compiler.thread_pool")


def modules() -> Iterator[str]:
    """Name the modules that may declare kernels."""
    for name in DECLARING:
        module = import_module(f"llamatrain.{name}")
        yield module.__name__
        for each in walk_packages(getattr(module, "__path__", ()), f"{module.__name__}."):
            if "llvm" not in each.name.split("."):  # it builds kernels with the compiler, and declares none
                yield each.name


def declared() -> list[Compilable]:
    every = (value for name in modules() for value in vars(import_module(name)).values())
    found = {each.where: each for each in every if isinstance(each, Compilable)}
    return [found[where] for where in sorted(found)]
