"""The optimizers there are. Their names are those of the files in methods/, which are read when one is asked for."""

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from llamatrain.optim import methods

if TYPE_CHECKING:
    from llamatrain.optim.optimizer import Optimizer


def optimizer_names() -> tuple[str, ...]:
    return tuple(sorted(module.name for module in iter_modules(methods.__path__)))


def get_optimizer(name: str) -> type["Optimizer"]:
    """The one that a file of methods/ is about."""
    found: type[Optimizer] = import_module(f"{methods.__name__}.{name}").OPTIMIZER
    return found


def optimizers_by_checkpoint_name() -> dict[str, type["Optimizer"]]:
    """By what a checkpoint calls them."""
    return {each.checkpoint_name: each for each in map(get_optimizer, optimizer_names())}


def unused_options(name: str) -> Iterator[str]:
    """The options that only other optimizers take."""
    others = (option for other in optimizer_names() for option in get_optimizer(other).used_options())
    yield from dict.fromkeys(option for option in others if option not in get_optimizer(name).used_options())
