"""The description of an architecture: its weights, its metadata keys, and its blocks as a graph.

In names, `{}` stands for the number of a block. H is the type of the hyperparameters
(hyperparameters.Hyperparameters), F of a forward pass (forward.ForwardPass); both modules import this one.
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
SupportedValue = tuple[int | float | bool, str]
BLOCK_NUMBER = re.compile(r"(?<=\.)(?:0|[1-9][0-9]{0,5})(?=\.)")


@dataclass(frozen=True, kw_only=True)
class WeightKind(Generic[H]):
    """A weight that a model has once, or once in each block."""

    role: Role
    shape: Callable[[H], Shape]  # of a matrix (out, in)
    module: str  # Hugging Face's name of the module that it is in
    rotary_heads: Callable[[H], int] | None = None  # of q and k: the heads that its rows make
    residual: bool = False  # its product is added to what went into the block
    optional: bool = False  # some models have it, and others do not

    @property
    def adaptable(self) -> bool:
        """True if the weight may have a LoRA adapter of its own shape."""
        return self.role in ("embedding", "output", "matrix")

    @property
    def has_transposed_lora(self) -> bool:
        """True if rows of the weight are looked up, so that LoRA's a is (vocabulary, r) and b is (width, r)."""
        return self.role == "embedding"


@dataclass(frozen=True)
class Key:
    """A number in a file: its hyperparameter, type and default. None as default means that it is required."""

    field: str
    kind: type = int
    default: float | Callable[[Mapping[str, Any]], float] | None = None  # by the numbers of the keys before
    min_value: float = 0  # of those that few architectures have

    @property
    def max_value(self) -> float:
        """The largest number that a file can hold."""
        return float(np.finfo(np.float32).max) if self.kind is float else np.iinfo(np.uint32).max

    def default_value(self, known: Mapping[str, Any]) -> Any:
        """Return the value for a missing key, by the values of the keys before it."""
        return known.get(self.field, self.default(known) if callable(self.default) else self.default)

    def read(self, gguf: Gguf, key: str, known: Mapping[str, Any]) -> Any:
        """Read the value of a key, or its default."""
        return gguf.get_value(key, self.kind, self.default_value(known))


@dataclass(frozen=True)
class WindowPattern(Key):
    """The period of sliding windows: each block has one except the last of each period; 0 means each block.

    A file may list the blocks instead.
    """

    def read(self, gguf: Gguf, key: str, known: Mapping[str, Any]) -> Any:
        """Read the period, or find it in a list of one bool for each block."""
        marks = gguf.metadata.get(key)
        if not isinstance(marks, list | np.ndarray):
            return super().read(gguf, key, known)
        layers = known["layers"]
        if isinstance(marks, np.ndarray) and marks.dtype.kind in "biu" and len(marks) == layers:
            windows = [bool(mark) for mark in marks]
            period = windows.index(False) + 1 if False in windows else 0
            if windows == [is_windowed(period, layer) for layer in range(layers)]:
                return period
        raise FileError(
            f"{gguf.path}: {key} is not a repeating pattern of {layers} blocks; only such patterns are supported",
            code="unsupported-windows",
        )


def is_windowed(period: int, layer: int) -> bool:
    """Return True if a block has a window."""
    return not period or layer % period < period - 1


@dataclass(frozen=True, kw_only=True)
class AttentionMask:
    """The keys that the queries of a block see, and how scores are scaled."""

    scale: float  # of scores
    window: int = 0  # the last so many keys alone, a token's own among them; 0: all
    cap: float = 0.0  # what scores come near, and do not reach; 0: none


def full_attention(h: Any, layer: int) -> AttentionMask:
    """Return the mask of a block without window and cap."""
    return AttentionMask(scale=h.head_size**-0.5)


@dataclass(frozen=True, kw_only=True, eq=False)
class Architecture(Generic[H, F]):
    """A model architecture. An instance in a module of `architectures/` is all that a new one needs."""

    name: str  # general.architecture
    keys: Mapping[str, Key]  # in a file behind the name; two keys of one field must agree
    weights: Mapping[str, WeightKind[H]]  # by GGUF names, in the order of files
    rotation: Rotation
    embed: Callable[[F], Tensor]  # what goes into the first block, a row a token
    block: Callable[[F, int, Tensor], Tensor]  # its number and what goes in
    final_norm: Callable[[F, Tensor], Tensor]  # what the output weight reads
    tied: bool | None = None  # whether embeddings serve as output; None: as the file has it
    ties_by_default: bool = False  # whether those of a new model do, unasked
    heads_fill_width: bool = False  # whether all heads together are as wide as the model
    partial_rotary: bool = False  # whether a part of a head may turn, and the rest not
    ropes: Callable[[H], Sequence[Rope]] = lambda h: [h.rope]  # type: ignore[attr-defined]  # that its blocks know
    rope_index: Callable[[H, int], int | None] = lambda h, layer: (
        0
    )  # which of them a block's heads take; None: none
    attention_mask: Callable[[H, int], AttentionMask] = full_attention
    logit_cap: Callable[[H], float] = lambda h: 0.0  # of logits, likewise; 0: none
    new_model_values: Mapping[str, float] = field(
        default_factory=dict
    )  # numbers of new models, unlike those of missing keys
    supported_values: Mapping[str, SupportedValue] = field(
        default_factory=dict
    )  # keys, the one value that is supported, and what others are
    unsupported_names: Mapping[str, str] = field(
        default_factory=dict
    )  # names that are not supported, though near, and what these are

    def weight_kinds(
        self, layers: int, tied: bool, optional: Collection[str] = ()
    ) -> Iterator[tuple[str, WeightKind[H]]]:
        """Yield the weights of a model in file order; optional ones only if their pattern is in `optional`."""
        present = {
            pattern: kind
            for pattern, kind in self.weights.items()
            if not (tied and kind.role == "output") and (not kind.optional or pattern in optional)
        }
        for numbered, patterns in groupby(present, lambda pattern: "{}" in pattern):
            group = [*patterns]
            yield from (
                (each.format(layer), present[each])
                for layer in range(layers if numbered else 1)
                for each in group
            )

    def weight_kind(self, name: str) -> WeightKind[H] | None:
        """Return the kind of a weight by its name, or None."""
        pattern, number = split_block_number(name)
        return self.weights.get(pattern) if ("{}" in pattern) == (number is not None) else None

    def weight_with_role(self, role: Role) -> str:
        """Return the name of the one weight with a role."""
        return next(name for name, kind in self.weights.items() if kind.role == role)

    # ---- Hugging Face's names ----------------------------------------------

    @cached_property
    def _modules(self) -> dict[str, str]:
        return {kind.module: name for name, kind in self.weights.items() if kind.adaptable}

    def weight_for_module(self, module: str) -> str | None:
        """Return the adaptable weight of a Hugging Face module, or None."""
        pattern, number = split_block_number(module)
        name = self._modules.get(pattern)
        return None if name is None or ("{}" in pattern) != (number is not None) else name.format(number)

    def module_for_weight(self, name: str) -> str | None:
        """Return the Hugging Face module of an adaptable weight, or None."""
        kind = self.weight_kind(name)
        return kind.module.format(split_block_number(name)[1]) if kind and kind.adaptable else None


def split_block_number(name: str) -> tuple[str, str | None]:
    """Return a name with `{}` in place of the block number, and the number."""
    match = BLOCK_NUMBER.search(name)
    return (f"{name[: match.start()]}{{}}{name[match.end() :]}", match[0]) if match else (name, None)
