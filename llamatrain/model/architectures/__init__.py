"""The architectures, a module each, named as files have it in general.architecture: that a module is there is all it takes."""

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from llamatrain.errors import UsageError

if TYPE_CHECKING:
    from llamatrain.model.architecture import Architecture

USUAL = "llama"  # of new models, and of adapters whose files do not say it


def supported() -> list[str]:
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__))


def find(name: str) -> "Architecture[Any, Any]":
    if name not in supported():
        raise UsageError(unknown(name))
    return named(name)


def named(name: str) -> "Architecture[Any, Any]":
    found: Architecture[Any, Any] = import_module(f"{__name__}.{name.replace('-', '_')}").ARCHITECTURE
    return found


def unknown(name: str) -> str:
    """What is said of an architecture that is none of these: what it is, if that is known, and what is nearest."""
    from difflib import get_close_matches

    from llamatrain.gguf.parser import quoted

    there = supported()
    near = dict(relatives(there))
    nearest = near[name][0] if name in near else next(iter(get_close_matches(name, there, 1)), USUAL)
    what = near[name][1] if name in near else "a mixture of experts" if "moe" in name else ""
    verb, told = "is" if len(there) == 1 else "are", f", {what}," if what else ""
    return f"the architecture {quoted(name)}{told} is not supported; {', '.join(there)} {verb}; nearest to it is {nearest}"


def relatives(there: list[str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Names that are not supported, with the architecture that knows them, and what it says of them."""
    for each in there:
        yield from ((name, (each, what)) for name, what in named(each).relatives.items())
