"""The available optimizers. Each is a file in methods/, imported when it is needed."""

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from llamatrain.optim import methods

if TYPE_CHECKING:
    from llamatrain.optim.optimizer import Optimizer


def optimizer_names() -> tuple[str, ...]:
    """Return the names of all optimizers."""
    return tuple(sorted(module.name for module in iter_modules(methods.__path__)))


def get_optimizer(name: str) -> type["Optimizer"]:
    """Return an optimizer's class by name."""
    optimizer: type[Optimizer] = import_module(f"{methods.__name__}.{name}").OPTIMIZER
    return optimizer


def optimizers_by_checkpoint_name() -> dict[str, type["Optimizer"]]:
    """Return the classes by their names in checkpoints."""
    return {optimizer.checkpoint_name: optimizer for optimizer in map(get_optimizer, optimizer_names())}


def unused_options(name: str) -> Iterator[str]:
    """Yield the options that only other optimizers use."""
    others = (option for other in optimizer_names() for option in get_optimizer(other).used_options())
    yield from dict.fromkeys(option for option in others if option not in get_optimizer(name).used_options())
