"""The available objectives. Each is a file in objectives/, imported when it is needed."""

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from llamatrain.preference import objectives

if TYPE_CHECKING:
    from llamatrain.preference.objective import Objective

OBJECTIVES = tuple(sorted(module.name for module in iter_modules(objectives.__path__)))


def get_objective(name: str) -> type["Objective"]:
    """Return an objective's class by name."""
    objective: type[Objective] = import_module(f"{objectives.__name__}.{name}").OBJECTIVE
    return objective
