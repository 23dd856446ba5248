"""Loads what packages at the top add to packages below them.

An extension package has a table `EXTENSIONS` in its `__init__`: from the name of an extension point to
"module:name". The extension points, and what is expected there:

- "file_formats": a dict from magic bytes to a function that reads a `MappedFile` as a `Gguf`
- "checkpoint_upgrade": a function that converts an old checkpoint to the present form
- "adapter_formats": a list of `AdapterFormat`
- "model_folders": a function that converts a model folder of Hugging Face's and returns the GGUF file
- "command_lines": a function that replaces flags of other programs
"""

from functools import cache
from importlib import import_module
from typing import Any

PACKAGES = ("llamatrain.importing", "llamatrain.legacy")


@cache
def load_extensions(point: str) -> tuple[Any, ...]:
    """Import everything that is registered for an extension point."""
    found = []
    for package in PACKAGES:
        if target := import_module(package).EXTENSIONS.get(point):
            module, _, name = target.partition(":")
            found.append(getattr(import_module(f"{package}.{module}"), name))
    return tuple(found)
