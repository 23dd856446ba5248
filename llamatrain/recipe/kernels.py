"""All functions that are compiled, wherever they are declared."""

from importlib import import_module
from pkgutil import walk_packages

import llamatrain
from llamatrain.machine.entry import Compilable
from llamatrain.machine.shipped import COMPILED_HERE


def modules() -> list[str]:
    """All whose functions are compiled."""
    found = walk_packages(llamatrain.__path__, "llamatrain.")
    folders = tuple(f"llamatrain.{folder.replace('/', '.')}" for folder in COMPILED_HERE)
    return sorted(
        each.name for each in found if each.name.startswith(folders) and not {"compiler", "llvm"} & {*each.name.split(".")}
    )


def declared() -> list[Compilable]:
    every = (value for name in modules() for value in vars(import_module(name)).values())
    found = {each.where: each for each in every if isinstance(each, Compilable)}
    return [found[where] for where in sorted(found)]
