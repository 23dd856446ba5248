"""The architectures, a module for each, named like general.architecture in files, with _ for -.

Adding a module is enough.
"""

import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.abc import InspectLoader
from typing import TYPE_CHECKING, Any

from llamatrain.errors import UsageError

if TYPE_CHECKING:
    from llamatrain.model.architecture import Architecture

DEFAULT = "llama"  # for new models, and for adapters that do not name one
NO_TEXT = re.compile(r"^    causal=False", re.MULTILINE)  # what a module declares if its model predicts none
DECLARATION = re.compile(r'^    name="([^"]+)"', re.MULTILINE)


def supported_names() -> list[str]:
    """Return the names of supported architectures."""
    return sorted(declared_name(module) for module in pkgutil.iter_modules(__path__))


def text_model_names() -> list[str]:
    """Return the names of supported architectures that predict text."""
    modules = [*pkgutil.iter_modules(__path__)]
    return sorted(declared_name(module) for module in modules if not NO_TEXT.search(read_source(module)))


def declared_name(module: pkgutil.ModuleInfo) -> str:
    """Return the name that a module declares. An underscore may stand for itself or for a dash: the source tells.

    Importing all modules would take long.
    """
    if "_" not in module.name:
        return module.name
    declaration = DECLARATION.search(read_source(module))
    return declaration[1] if declaration else load_architecture(module.name).name


def read_source(module: pkgutil.ModuleInfo) -> str:
    """Return the source of a module; empty if there is none."""
    spec = module.module_finder.find_spec(module.name, None)
    loader = spec.loader if spec else None
    return (loader.get_source(module.name) or "") if isinstance(loader, InspectLoader) else ""


def find_architecture(name: str) -> "Architecture[Any, Any]":
    """Return an architecture by name. Raise UsageError if it is not supported."""
    if name not in supported_names():
        raise UsageError(describe_unknown(name), code="unsupported-architecture")
    return load_architecture(name)


def load_architecture(name: str) -> "Architecture[Any, Any]":
    """Import a supported architecture."""
    architecture: Architecture[Any, Any] = import_module(f"{__name__}.{name.replace('-', '_')}").ARCHITECTURE
    return architecture


def describe_unknown(name: str) -> str:
    """Return an error message for an unsupported architecture, with what it is and the nearest one."""
    from difflib import get_close_matches

    from llamatrain.gguf.parser import quote

    names = text_model_names()
    related = dict(related_names(names))
    nearest = related[name][0] if name in related else next(iter(get_close_matches(name, names, 1)), DEFAULT)
    description = related[name][1] if name in related else "a mixture of experts" if "moe" in name else ""
    clause = f", {description}," if description else ""
    return (
        f"the architecture {quote(name)}{clause} is not supported; use a model of another one, such as "
        f"{nearest}, which is the nearest"
    )


def related_names(names: list[str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield unsupported names that supported architectures describe, with those architectures."""
    for supported_name in names:
        yield from (
            (name, (supported_name, description))
            for name, description in load_architecture(supported_name).unsupported_names.items()
        )
