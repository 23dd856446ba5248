"""What an architecture says of itself: a table of its weights, the keys of its numbers, and its blocks as a graph.

In names, `{}` stands where a block has its number. H are a model's numbers (hyperparameters.Hyperparameters), F is a way through
the model (forward.ForwardPass): both stand on this table.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, Generic, Literal, TypeVar

from llamatrain.graph.tensor import Tensor

H = TypeVar("H")
F = TypeVar("F")
Shape = tuple[int, ...]
Role = Literal["embedding", "output", "matrix", "norm", "bias"]
Rotation = Literal["pairs", "halves"]  # element 2i of a head turns with 2i + 1, or i with i + size/2
NUMBER = re.compile(r"(?<=\.)(?:0|[1-9][0-9]{0,5})(?=\.)")


@dataclass(frozen=True, kw_only=True)
class WeightKind(Generic[H]):
    """A weight that a model has once, or each of its blocks."""

    role: Role
    shape: Callable[[H], Shape]  # of a matrix (out, in)
    module: str  # Hugging Face's name of the module that it is in
    rotated: Callable[[H], int] | None = None  # of q and k: the heads that its rows make
    residual: bool = False  # its product is added to what went into the block

    @property
    def adaptable(self) -> bool:
        return self.role in ("embedding", "output", "matrix")

    @property
    def turned(self) -> bool:
        """Rows are taken of it, so an adapter's factors change places: a is (vocabulary, r) and b (width, r)."""
        return self.role == "embedding"


@dataclass(frozen=True)
class Key:
    """A number in a file: its field in the hyperparameters, and what it is where the key is missing; None: it must be there."""

    field: str
    kind: type = int
    default: float | Callable[[Mapping[str, Any]], float] | None = None  # by the numbers of the keys before

    def missing(self, known: Mapping[str, Any]) -> Any:
        return known.get(self.field, self.default(known) if callable(self.default) else self.default)


@dataclass(frozen=True, kw_only=True, eq=False)
class Architecture(Generic[H, F]):
    name: str  # general.architecture
    keys: Mapping[str, Key]  # in a file behind the name; two keys of one field must agree
    weights: Mapping[str, WeightKind[H]]  # by GGUF names, in the order of files
    rotation: Rotation
    embed: Callable[[F], Tensor]  # what goes into the first block, a row a token
    block: Callable[[F, int, Tensor], Tensor]  # its number and what goes in
    last: Callable[[F, Tensor], Tensor]  # what the output weight reads
    refused: Mapping[str, str] = field(default_factory=dict)  # keys that may be 0 alone, and what else they would mean

    def kinds(self, layers: int, tied: bool) -> Iterator[tuple[str, WeightKind[H]]]:
        """The weights of a model, in the order of files."""
        for numbered, patterns in groupby(self.weights, lambda pattern: "{}" in pattern):
            group = [(each, self.weights[each]) for each in patterns if not (tied and self.weights[each].role == "output")]
            yield from ((each.format(layer), kind) for layer in range(layers if numbered else 1) for each, kind in group)

    def kind(self, name: str) -> WeightKind[H] | None:
        """Of a weight that models of this architecture may have."""
        pattern, number = pattern_of(name)
        return self.weights.get(pattern) if ("{}" in pattern) == (number is not None) else None

    def the(self, role: Role) -> str:
        """The name of the one weight with a role."""
        return next(name for name, kind in self.weights.items() if kind.role == role)

    # ---- Hugging Face's names ----------------------------------------------

    @cached_property
    def _modules(self) -> dict[str, str]:
        return {kind.module: name for name, kind in self.weights.items() if kind.adaptable}

    def weight_of(self, module: str) -> str | None:
        """The weight that may have an adapter, by its module's name."""
        pattern, number = pattern_of(module)
        name = self._modules.get(pattern)
        return None if name is None or ("{}" in pattern) != (number is not None) else name.format(number)

    def module_of(self, name: str) -> str | None:
        kind = self.kind(name)
        return kind.module.format(pattern_of(name)[1]) if kind and kind.adaptable else None


def pattern_of(name: str) -> tuple[str, str | None]:
    """A name without its block's number, and that."""
    found = NUMBER.search(name)
    return (f"{name[: found.start()]}{{}}{name[found.end() :]}", found[0]) if found else (name, None)
