"""The available objectives. Each is a file in objectives/, imported when it is needed."""

from importlib import import_module
from typing import TYPE_CHECKING

from llamatrain.preference import objectives

if TYPE_CHECKING:
    from llamatrain.preference.objective import Objective

OBJECTIVES = ("orpo", "dpo", "simpo", "kto")  # in the order of the help


def get_objective(name: str) -> type["Objective"]:
    """Return an objective's class by name."""
    objective: type[Objective] = import_module(f"{objectives.__name__}.{name}").OBJECTIVE
    return objective
