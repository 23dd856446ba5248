"""What an architecture says of itself: a table of its weights, the keys of its numbers, and its blocks as a graph.

In names, `{}` stands where a block has its number. H are a model's numbers (hyperparameters.Hyperparameters), F is a way through
the model (forward.ForwardPass): both stand on this table.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from llamatrain.errors import FileError
from llamatrain.gguf.reader import Gguf
from llamatrain.graph.tensor import Tensor
from llamatrain.model.rope import Rope

H = TypeVar("H")
F = TypeVar("F")
Shape = tuple[int, ...]
Role = Literal["embedding", "output", "matrix", "norm", "bias"]
Rotation = Literal["pairs", "halves"]  # element 2i of a head turns with 2i + 1, or i with i + size/2
Refused = tuple[int | float | bool, str]
NUMBER = re.compile(r"(?<=\.)(?:0|[1-9][0-9]{0,5})(?=\.)")


@dataclass(frozen=True, kw_only=True)
class WeightKind(Generic[H]):
    """A weight that a model has once, or each of its blocks."""

    role: Role
    shape: Callable[[H], Shape]  # of a matrix (out, in)
    module: str  # Hugging Face's name of the module that it is in
    rotated: Callable[[H], int] | None = None  # of q and k: the heads that its rows make
    residual: bool = False  # its product is added to what went into the block
    optional: bool = False  # some models have it, and others do not

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
    least: float = 0  # of those that few architectures have

    @property
    def most(self) -> float:
        """What files hold."""
        return float(np.finfo(np.float32).max) if self.kind is float else np.iinfo(np.uint32).max

    def missing(self, known: Mapping[str, Any]) -> Any:
        return known.get(self.field, self.default(known) if callable(self.default) else self.default)

    def read(self, gguf: Gguf, key: str, known: Mapping[str, Any]) -> Any:
        return gguf.value(key, self.kind, self.missing(known))


@dataclass(frozen=True)
class WindowPattern(Key):
    """Which blocks have windows: all but the last of so many, again and again; 0: all. A file may list the blocks instead."""

    def read(self, gguf: Gguf, key: str, known: Mapping[str, Any]) -> Any:
        marks = gguf.metadata.get(key)
        if not isinstance(marks, list | np.ndarray):
            return super().read(gguf, key, known)
        layers = known["layers"]
        if isinstance(marks, np.ndarray) and marks.dtype.kind in "biu" and len(marks) == layers:
            found = [bool(mark) for mark in marks]
            period = found.index(False) + 1 if False in found else 0
            if found == [windowed(period, layer) for layer in range(layers)]:
                return period
        raise FileError(
            f"{gguf.path}: {key} is no pattern of {layers} blocks that repeats; only such are supported"
        )


def windowed(period: int, layer: int) -> bool:
    return not period or layer % period < period - 1


@dataclass(frozen=True, kw_only=True)
class AttentionMask:
    """How the queries of a block see its keys."""

    scale: float  # of scores
    window: int = 0  # the last so many keys alone, a token's own among them; 0: all
    cap: float = 0.0  # what scores come near, and do not reach; 0: none


def plain_sight(h: Any, layer: int) -> AttentionMask:
    return AttentionMask(scale=h.head_size**-0.5)


@dataclass(frozen=True, kw_only=True, eq=False)
class Architecture(Generic[H, F]):
    name: str  # general.architecture
    keys: Mapping[str, Key]  # in a file behind the name; two keys of one field must agree
    weights: Mapping[str, WeightKind[H]]  # by GGUF names, in the order of files
    rotation: Rotation
    embed: Callable[[F], Tensor]  # what goes into the first block, a row a token
    block: Callable[[F, int, Tensor], Tensor]  # its number and what goes in
    last: Callable[[F, Tensor], Tensor]  # what the output weight reads
    tied: bool | None = None  # whether embeddings serve as output; None: as the file has it
    ties: bool = False  # whether those of a new model do, unasked
    narrow: bool = False  # whether all heads together are as wide as the model
    partly: bool = False  # whether a part of a head may turn, and the rest not
    rotations: Callable[[H], Sequence[Rope]] = lambda h: [h.rope]  # type: ignore[attr-defined]  # that its blocks know
    turned: Callable[[H, int], int | None] = lambda h, layer: (
        0
    )  # which of them a block's heads take; None: none
    sight: Callable[[H, int], AttentionMask] = plain_sight
    cap: Callable[[H], float] = lambda h: 0.0  # of logits, likewise; 0: none
    new: Mapping[str, float] = field(
        default_factory=dict
    )  # numbers of new models, unlike those of missing keys
    refused: Mapping[str, Refused] = field(
        default_factory=dict
    )  # keys, the one value that is supported, and what others are
    relatives: Mapping[str, str] = field(
        default_factory=dict
    )  # names that are not supported, though near, and what these are

    def kinds(
        self, layers: int, tied: bool, more: Collection[str] = ()
    ) -> Iterator[tuple[str, WeightKind[H]]]:
        """The weights of a model, in the order of files; of those that are optional those whose patterns are among `more`."""
        there = {
            pattern: kind
            for pattern, kind in self.weights.items()
            if not (tied and kind.role == "output") and (not kind.optional or pattern in more)
        }
        for numbered, patterns in groupby(there, lambda pattern: "{}" in pattern):
            group = [*patterns]
            yield from (
                (each.format(layer), there[each])
                for layer in range(layers if numbered else 1)
                for each in group
            )

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
