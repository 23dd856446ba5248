"""Limits of hyperparameters."""

from llamatrain.errors import UsageError

MAX_SIZE = 1 << 24  # the largest size; larger ones come from damaged files or typing errors
MAX_LAYERS = 1 << 12  # layers
MANY_LAYERS = 1 << 7  # layers from which on work for each layer takes a while


class BadHyperparameter(UsageError):
    """A hyperparameter is out of range. `field` is its name here; callers know its key or option."""

    def __init__(self, field: str, value: str, why: str) -> None:
        super().__init__(code="invalid-hyperparameter")
        self.field, self.value, self.reason = field, value, why

    def describe(self, name: str) -> str:
        """Return the message with `name` as the name of the hyperparameter."""
        return f"{name} {self.reason} (got {self.value})"

    def __str__(self) -> str:
        return self.describe(self.field)
