"""The architectures, a module each, named as files have it in general.architecture: that a module is there is all it takes."""

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from llamatrain.errors import UsageError

if TYPE_CHECKING:
    from llamatrain.model.architecture import Architecture

DEFAULT = "llama"  # of new models, and of adapters whose files do not say it


def supported_names() -> list[str]:
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__))


def find_architecture(name: str) -> "Architecture[Any, Any]":
    if name not in supported_names():
        raise UsageError(describe_unknown(name))
    return load_architecture(name)


def load_architecture(name: str) -> "Architecture[Any, Any]":
    architecture: Architecture[Any, Any] = import_module(f"{__name__}.{name.replace('-', '_')}").ARCHITECTURE
    return architecture


def describe_unknown(name: str) -> str:
    """What is said of an architecture that is none of these: what it is, if that is known, and what is nearest."""
    from difflib import get_close_matches

    from llamatrain.gguf.parser import quote

    names = supported_names()
    related = dict(related_names(names))
    nearest = related[name][0] if name in related else next(iter(get_close_matches(name, names, 1)), DEFAULT)
    description = related[name][1] if name in related else "a mixture of experts" if "moe" in name else ""
    verb, clause = "is" if len(names) == 1 else "are", f", {description}," if description else ""
    return f"the architecture {quote(name)}{clause} is not supported; {', '.join(names)} {verb}; nearest to it is {nearest}"


def related_names(names: list[str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Names that are not supported, with the architecture that knows them, and what it says of them."""
    for supported_name in names:
        yield from (
            (name, (supported_name, description))
            for name, description in load_architecture(supported_name).unsupported_names.items()
        )
