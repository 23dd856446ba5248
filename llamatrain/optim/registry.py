"""The optimizers there are. Their names are those of the files in methods/, which are read when one is asked for."""

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from llamatrain.optim import methods

if TYPE_CHECKING:
    from llamatrain.optim.optimizer import Optimizer


def names() -> tuple[str, ...]:
    return tuple(sorted(module.name for module in iter_modules(methods.__path__)))


def named(name: str) -> type["Optimizer"]:
    """The one that a file of methods/ is about."""
    found: type[Optimizer] = import_module(f"{methods.__name__}.{name}").OPTIMIZER
    return found


def by_kind() -> dict[str, type["Optimizer"]]:
    """By what a checkpoint calls them."""
    return {each.kept_as: each for each in map(named, names())}


def unused_options(name: str) -> Iterator[str]:
    """The options that only other optimizers take."""
    others = (option for other in names() for option in named(other).takes())
    yield from dict.fromkeys(option for option in others if option not in named(name).takes())
