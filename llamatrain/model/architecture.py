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
from llamatrain.gguf.values import Kind
from llamatrain.graph.tensor import Tensor
from llamatrain.model.limits import MAX_LAYERS
from llamatrain.model.rope import Rope

H = TypeVar("H")
F = TypeVar("F")
Shape = tuple[int, ...]
# a router chooses among experts, a stack of matrices of which each token uses some; a table is looked up by token, a
# stack has several matrices, taps are those of a convolution: these have no adapter; a constant is a vector that is
# never trained
Role = Literal[
    "embedding",
    "output",
    "matrix",
    "router",
    "experts",
    "norm",
    "bias",
    "table",
    "stack",
    "taps",
    "constant",
]
Rotation = Literal["pairs", "halves"]  # element 2i of a head rotates with 2i + 1, or i with i + size/2
SupportedValue = tuple[int | float | bool, str]
TEXT_PREFIX = "language_model."  # in names of modules: of the text model in a vision model
BLOCK_NUMBER = re.compile(r"(?<=\.)(?:0|[1-9][0-9]{0,5})(?=\.)")


@dataclass(frozen=True, kw_only=True)
class WeightKind(Generic[H]):
    """A weight that a model has once, or once in each block."""

    role: Role
    shape: Callable[[H], Shape]  # (out, in) for a matrix, by the sizes of its block
    module: str  # the name of its module in Hugging Face's models; of a plain parameter, its own
    rotary_heads: Callable[[H], int] | None = None  # of q and k: the number of heads in its rows
    default_target: bool = True  # of a block's matrix: it gets an adapter if no targets are named
    residual: bool = False  # its product is added to the residual stream
    optional: bool = False  # only some models have it
    optional_by_block: bool = False  # if optional: some blocks of a file may have it, and others not
    replaced_by: str = ""  # an optional weight that some files have instead of it
    present: Callable[[H, int], bool] | None = None  # if not all blocks have it: True if a block does
    # for each row, or column, its place in Hugging Face's weight, if that has another order
    row_order: Callable[[H], np.ndarray] | None = None
    column_order: Callable[[H], np.ndarray] | None = None
    # (number, count): Hugging Face's module has the rows of `count` weights, and this is one of them. They lie one
    # behind the other and are equally many, if there is no `row_order`, which has their places in the module
    part: tuple[int, int] = (0, 1)
    is_parameter: bool = False  # there it is a plain parameter of a module that is no linear layer
    adapter_problem: str = ""  # why it has no adapter, though others of its role have; "": it may have one
    trained_as_log: bool = False  # all training of the weight w changes log(-w), so that w stays below 0
    initial: Callable[[np.random.Generator, Shape], np.ndarray] | None = None  # values in a new model

    @property
    def adaptable(self) -> bool:
        """True if the weight may have a LoRA adapter of its own shape."""
        roles = ("embedding", "output", "matrix", "router", "experts")
        return self.role in roles and not self.adapter_problem

    @property
    def has_lora(self) -> bool:
        """True if adapters here may change the weight; norms have them too."""
        return self.adaptable or self.role == "norm"

    @property
    def stays_float32(self) -> bool:
        """True if the weight is small and read by no product: it is float32 in memory, whatever its file has."""
        return self.role in ("norm", "bias", "constant", "taps")

    @property
    def has_transposed_lora(self) -> bool:
        """True if rows of the weight are looked up, so that LoRA's a is (vocabulary, r) and b is (width, r)."""
        return self.role == "embedding"


@dataclass(frozen=True)
class Key:
    """A number in a file: its hyperparameter, type and default. None as default means that it is required."""

    field: str
    kind: type = int
    default: float | Callable[[Mapping[str, Any]], float] | None = (
        None  # a function of the values of the keys before it
    )
    min_value: float = 0  # for hyperparameters that few architectures have
    by_block: bool = False  # a file may have an array with a number for each block
    is_left_out: bool = False  # 0 is no number of a file, and no hyperparameter

    @property
    def max_value(self) -> float:
        """The largest number that a file can hold."""
        return float(np.finfo(np.float32).max) if self.kind is float else np.iinfo(np.uint32).max

    @property
    def array_kind(self) -> Kind:
        """The type of the numbers in an array."""
        return {int: Kind.INT32, float: Kind.FLOAT32, bool: Kind.BOOL}[self.kind]

    def default_value(self, known: Mapping[str, Any]) -> Any:
        """Return the value for a missing key, by the values of the keys before it."""
        return known.get(self.field, self.default(known) if callable(self.default) else self.default)

    def stored_value(self, values: Mapping[str, Any]) -> Any:
        """Return the value that a file has, by all hyperparameters."""
        return values.get(self.field, 0) if self.is_left_out else values[self.field]

    def read(self, gguf: Gguf, key: str, known: Mapping[str, Any]) -> Any:
        """Read the value of a key, or its default; a tuple if the file has a number for each block."""
        found = gguf.metadata.get(key) if self.by_block else None
        if isinstance(found, list | np.ndarray):
            return self._check_array(gguf, key, found, known["layers"])
        return gguf.get_value(key, self.kind, self.default_value(known))

    def _check_array(self, gguf: Gguf, key: str, found: Any, layers: int) -> tuple[Any, ...]:
        kinds = {int: "iu", float: "f", bool: "biu"}[self.kind]
        if isinstance(found, np.ndarray) and found.dtype.kind in kinds and len(found) == layers:
            values = tuple(self.kind(value) for value in found)
            if all(self.min_value <= value <= self.max_value for value in values):
                return values
        raise FileError(
            f"{gguf.path}: {key} must have a number in range for each of {layers} blocks; the file is damaged",
            code="invalid-hyperparameter",
        )


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
            f"{gguf.path}: {key} is not a repeating pattern of {layers} blocks; only such patterns are "
            "supported",
            code="unsupported-windows",
        )


def is_windowed(period: int, layer: int) -> bool:
    """Return True if a block has a window."""
    return not period or layer % period < period - 1


@dataclass(frozen=True, kw_only=True)
class NumberList:
    """Several numbers in a file, such as one for each block. A single number in a file stands for all."""

    field: str
    kind: type
    # the numbers of a new model, by its number of blocks and the size of its heads
    initial: Callable[[int, int], tuple[float, ...]]
    has_prefix: bool = True  # its key begins with the architecture's name

    def full_key(self, architecture: str, key: str) -> str:
        """Return the key as it is in files."""
        return f"{architecture}.{key}" if self.has_prefix else key

    def read(self, gguf: Gguf, key: str, known: Mapping[str, Any]) -> tuple[float, ...]:
        """Read the numbers."""
        layers = min(known["layers"], MAX_LAYERS)
        found, count = gguf.metadata.get(key), len(self.initial(layers, known["head_size"]))
        if not isinstance(found, list | np.ndarray):
            return (gguf.get_value(key, self.kind),) * count
        kinds = "iu" if self.kind is int else "f"
        if not (isinstance(found, np.ndarray) and found.dtype.kind in kinds and found.shape == (count,)):
            raise FileError(
                f"{gguf.path}: {key} must be {count} numbers of type {self.kind.__name__}",
                code="invalid-hyperparameter",
            )
        if not np.all(np.abs(found.astype(np.float64)) <= np.finfo(np.float32).max):
            raise FileError(f"{gguf.path}: {key} must be finite numbers", code="invalid-hyperparameter")
        return tuple(found.tolist())


@dataclass(frozen=True, kw_only=True)
class AttentionMask:
    """The keys that the queries of a block see, and how scores are scaled."""

    scale: float  # of scores
    # the number of visible keys, with the token's own; 0: all. Where tokens see later ones, half of it is to each side
    window: int = 0
    cap: float = 0.0  # the soft cap of scores; 0: none


def full_attention(h: Any, layer: int) -> AttentionMask:
    """Return the mask of a block without window and cap."""
    return AttentionMask(scale=h.head_size**-0.5)


@dataclass(frozen=True, kw_only=True, eq=False)
class Architecture(Generic[H, F]):
    """A model architecture. An instance in a module of `architectures/` is all that a new one needs."""

    name: str  # general.architecture
    keys: Mapping[str, Key]  # without the architecture's name; two keys of one field must agree
    weights: Mapping[str, WeightKind[H]]  # by GGUF name, in file order
    rotation: Rotation
    lists: Mapping[str, NumberList] = field(default_factory=dict)  # by key, like `keys`
    embed: Callable[[F], Tensor]  # the input of the first block, a row for each token
    block: Callable[[F, int, Tensor], Tensor]  # the block's number and its input
    final_norm: Callable[[F, Tensor], Tensor]  # the input of the output weight
    tied: bool | None = None  # True if embeddings are the output weight; None: as in the file
    ties_by_default: bool = False  # the default of new models
    heads_fill_width: bool = False  # True if all heads together are as wide as the model
    partial_rotary: bool = False  # True if only a part of a head may rotate
    ropes: Callable[[H], Sequence[Rope]] = lambda h: [h.rope]  # type: ignore[attr-defined]  # that its blocks know
    # the rotation of a block; None: no rotation
    rope_index: Callable[[H, int], int | None] = lambda h, layer: 0
    attention_mask: Callable[[H, int], AttentionMask] = full_attention
    # the block whose keys and values a block reads: itself, or an earlier one
    kv_block: Callable[[H, int], int] = lambda h, layer: layer
    # hyperparameters that are others in a block, besides those for which files have arrays
    block_values: Callable[[H, int], Mapping[str, Any]] = lambda h, layer: {}
    causal: bool = (
        True  # False: tokens also see later ones; the model is for embeddings, and predicts no text
    )
    logit_cap: Callable[[H], float] = lambda h: 0.0  # the soft cap of logits; 0: none
    attends: Callable[[H, int], bool] = lambda h, layer: True  # False for a block without attention
    # the shapes of the state that a block keeps of a text while decoding, if any
    states: Callable[[H, int], Mapping[str, Shape]] = lambda h, layer: {}
    shifts_context: bool = True  # a full context can be shifted while decoding
    check: Callable[[H], None] = lambda h: None  # raises BadHyperparameter if numbers do not fit together
    # True if the tensors of a block are not used, but belong to the file
    is_kept: Callable[[H, int], bool] = lambda h, layer: False
    # values for new models that differ from those of missing keys, or functions of the model's sizes
    new_model_values: Mapping[str, float | Callable[[Mapping[str, int]], float]] = field(default_factory=dict)
    # numbers of each block of a new model, by the number of blocks and of key/value heads
    new_model_blocks: Callable[[int, int], Mapping[str, tuple[Any, ...]]] = lambda count, kv_heads: {}
    new_model_rope: Callable[[Rope], Rope] = lambda rope: rope
    new_model_weights: frozenset[str] = frozenset()  # optional weights of new models
    expert_has_ff: bool = False  # the feed-forward width is that of an expert
    # by key: the supported value, and what other values mean
    supported_values: Mapping[str, SupportedValue] = field(default_factory=dict)
    peft_problem: str = ""  # why adapters of PEFT cannot be converted; "": they can
    # related architectures that are not supported, and what they are
    unsupported_names: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_experts(self) -> bool:
        """True if new models have mixtures of experts."""
        return "experts" in self.new_model_values

    def weight_kinds(
        self,
        layers: int,
        tied: bool,
        optional: Collection[str] = (),
        is_present: Callable[[WeightKind[H], int], bool] = lambda kind, layer: True,
    ) -> Iterator[tuple[str, WeightKind[H]]]:
        """Yield the weights of a model in file order.

        Optional ones are yielded if `optional` has their pattern or their name, and those that not all blocks
        have if `is_present` is true for the block.
        """
        kinds = {
            pattern: kind for pattern, kind in self.weights.items() if not (tied and kind.role == "output")
        }
        for numbered, patterns in groupby(kinds, lambda pattern: "{}" in pattern):
            group = [*patterns]
            for layer in range(layers if numbered else 1):
                for pattern in group:
                    kind, name = kinds[pattern], pattern.format(layer)
                    if is_in_file(kind, name, optional) and is_present(kind, layer):
                        yield name, kind

    def weight_kind(self, name: str) -> WeightKind[H] | None:
        """Return the kind of a weight by its name, or None."""
        pattern, number = split_block_number(name)
        return self.weights.get(pattern) if ("{}" in pattern) == (number is not None) else None

    def weight_with_role(self, role: Role) -> str:
        """Return the name of the one weight with a role."""
        return next(name for name, kind in self.weights.items() if kind.role == role)

    # ---- Hugging Face's names ----------------------------------------------

    @cached_property
    def _modules(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name, kind in sorted(self.weights.items(), key=lambda item: item[1].part):
            if kind.adaptable:
                found.setdefault(kind.module.replace(TEXT_PREFIX, ""), []).append(name)
        return found

    def weights_for_module(self, module: str) -> list[str]:
        """Return the adaptable weights of a Hugging Face module, in the order of its rows: one, several or none."""
        pattern, number = split_block_number(module.replace(TEXT_PREFIX, ""))
        is_complete = ("{}" in pattern) == (number is not None)
        return [name.format(number) for name in self._modules.get(pattern, ()) if is_complete]

    def module_for_weight(self, name: str) -> str | None:
        """Return the Hugging Face module of an adaptable weight, or None."""
        kind = self.weight_kind(name)
        return kind.module.format(split_block_number(name)[1]) if kind and kind.adaptable else None


def is_in_file(kind: WeightKind[Any], name: str, optional: Collection[str]) -> bool:
    """Return True if files with these optional weights, by pattern or name, have a weight."""
    pattern, number = split_block_number(name)

    def has(other: str) -> bool:
        return other in optional or other.format(number) in optional

    return (has(pattern) or not kind.optional) and not (kind.replaced_by and has(kind.replaced_by))


def split_block_number(name: str) -> tuple[str, str | None]:
    """Return a name with `{}` in place of the block number, and the number."""
    match = BLOCK_NUMBER.search(name)
    return (f"{name[: match.start()]}{{}}{name[match.end() :]}", match[0]) if match else (name, None)
