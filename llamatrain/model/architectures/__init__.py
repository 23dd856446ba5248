"""The architectures, a module each, named as files have it in general.architecture: that a module is there is all it takes."""

import pkgutil
from importlib import import_module
from typing import Any

from llamatrain.errors import UsageError
from llamatrain.files.cursor import quoted
from llamatrain.model.architecture import Architecture

USUAL = "llama"  # of new models, and of adapters whose files do not say it


def supported() -> list[str]:
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__))


def find(name: str) -> Architecture[Any, Any]:
    if name not in (there := supported()):
        verb = "is" if len(there) == 1 else "are"
        raise UsageError(f"the architecture {quoted(name)} is not supported; {', '.join(there)} {verb}")
    found = import_module(f"{__name__}.{name.replace('-', '_')}").ARCHITECTURE
    assert isinstance(found, Architecture)
    return found
