"""Hyperparameters: read from a GGUF file's metadata or from options, and written as metadata."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from llamatrain.errors import FileError, UsageError
from llamatrain.gguf.constants import LlamaFileType
from llamatrain.gguf.parser import quote
from llamatrain.gguf.reader import Gguf
from llamatrain.gguf.values import Kind, Value, boolean, f32, numbers, string, u32
from llamatrain.model import rope
from llamatrain.model.architecture import (
    Architecture,
    AttentionMask,
    Shape,
    WeightKind,
    is_in_file,
    split_block_number,
)
from llamatrain.model.architectures import find_architecture
from llamatrain.model.limits import MAX_LAYERS, MAX_SIZE, BadHyperparameter
from llamatrain.model.rope import Rope, to_float32

OUTPUT = "output.weight"
IGNORED_TENSORS = ("blk.{}.attn_rot_embd", "blk.{}.rope_freqs")  # tensors of old files that are ignored
ALL_F32 = LlamaFileType.ALL_F32  # general.file_type
ARRAY_KINDS = {int: Kind.UINT32, float: Kind.FLOAT32}


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """The sizes and numbers that define a model.

    Checkpoints identify their base by the repr of these fields, so it must not change.
    """

    vocab: int
    embd: int
    layers: int
    heads: int
    kv_heads: int
    ff: int
    ctx: int
    head_size: int
    rope: Rope
    rms_eps: float = 1e-5
    tied: bool = False  # the embeddings are also the output weight
    architecture: Architecture["Hyperparameters", Any] = field(repr=False)
    # the patterns of the optional weights that it has
    optional_weights: frozenset[str] = field(default=frozenset(), repr=False)
    # hyperparameters that few architectures have
    extra: Mapping[str, float] = field(default_factory=dict, repr=False, hash=False)
    # numbers that differ between blocks, one for each; of `heads`, `kv_heads` and `ff`, the field has the largest
    by_block: Mapping[str, tuple[Any, ...]] = field(default_factory=dict, repr=False, hash=False)
    # lists of numbers that few architectures have
    lists: Mapping[str, tuple[float, ...]] = field(default_factory=dict, repr=False, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rms_eps", to_float32(self.rms_eps))
        extra = {
            name: to_float32(value) if isinstance(value, float) else value
            for name, value in self.extra.items()
        }
        object.__setattr__(self, "extra", extra)
        object.__setattr__(
            self,
            "lists",
            {
                name: tuple(to_float32(each) if isinstance(each, float) else each for each in values)
                for name, values in self.lists.items()
            },
        )
        for name in ("vocab", "embd", "layers", "heads", "kv_heads", "ff", "ctx", "head_size"):
            value, most = getattr(self, name), MAX_LAYERS if name == "layers" else MAX_SIZE
            if not 1 <= value <= most:
                raise BadHyperparameter(name, f"{value}", f"must be 1 to {most}")
        if self.heads % self.kv_heads:
            raise BadHyperparameter("kv_heads", f"{self.kv_heads}", f"must divide the {self.heads} heads")
        if self.architecture.heads_fill_width and self.width != self.embd:
            raise BadHyperparameter(
                "head_size",
                f"{self.head_size}",
                f"times {self.heads} heads must be the width of the model, {self.embd}",
            )
        if self.rope.size % 2 or not 0 < self.rope.size <= self.head_size:
            raise BadHyperparameter(
                "size", f"{self.rope.size}", f"must be even and at most the head size, {self.head_size}"
            )
        if self.rope.size != self.head_size and not self.architecture.partial_rotary:
            raise BadHyperparameter(
                "size",
                f"{self.rope.size}",
                f"must be the head size, {self.head_size}, in a {self.architecture.name}",
            )
        if not 0 < self.rms_eps < 1:
            raise BadHyperparameter("rms_eps", f"{self.rms_eps:g}", "must be between 0 and 1, such as 1e-5")
        self.architecture.check(self)

    @property
    def width(self) -> int:
        """The width of all heads together."""
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        """The width of all key/value heads together."""
        return self.kv_heads * self.head_size

    @property
    def shapes(self) -> dict[str, Shape]:
        """The shape of each weight by its GGUF name, in file order; matrices are (out, in)."""
        return {name: kind.shape(self.for_weight(name)) for name, kind in self.weight_kinds()}

    def weight_kinds(self) -> Iterator[tuple[str, WeightKind["Hyperparameters"]]]:
        """Yield the weights by name, in file order."""

        def is_present(kind: WeightKind["Hyperparameters"], layer: int) -> bool:
            return kind.present is None or kind.present(self, layer)

        return self.architecture.weight_kinds(self.layers, self.tied, self.optional_weights, is_present)

    def weight_kind(self, name: str) -> WeightKind["Hyperparameters"]:
        """Return the kind of one of the model's weights."""
        found = self.architecture.weight_kind(name)
        assert found, name
        return found

    def weights_for_module(self, module: str) -> list[str]:
        """Return the adaptable weights of a Hugging Face module in the order of its rows.

        Of weights that files have one instead of the other, these are the model's.
        """
        found = self.architecture.weights_for_module(module)
        return [
            name
            for name in found
            if len(found) == 1 or is_in_file(self.weight_kind(name), name, self.optional_weights)
        ]

    def is_matrix(self, name: str) -> bool:
        """Return True if a weight is a factor of products or a table of embeddings, which may be quantized."""
        return not self.weight_kind(name).stays_float32

    # ---- blocks that differ in size ----------------------------------------

    def for_block(self, layer: int) -> "Hyperparameters":
        """Return the hyperparameters with the sizes of one block."""
        return self._blocks[layer] if layer < len(self._blocks) else self

    def for_weight(self, name: str) -> "Hyperparameters":
        """Return the hyperparameters with the sizes of the block that a weight belongs to."""
        number = split_block_number(name)[1] if self._blocks else None
        return self if number is None else self.for_block(int(number))

    @cached_property
    def _blocks(self) -> "tuple[Hyperparameters, ...]":
        """The hyperparameters of each block; none if all blocks have the same sizes."""
        changes = [self._block_values(layer) for layer in range(self.layers)]
        return tuple(replace(self, by_block={}, **each) for each in changes) if any(changes) else ()

    def _block_values(self, layer: int) -> dict[str, Any]:
        """Return the fields that differ in a block; 0 as a number of a block means that it needs none."""
        values = {name: values[layer] for name, values in self.by_block.items() if name in COMMON_FIELDS}
        own = {name: value for name, value in values.items() if value and value != getattr(self, name)}
        return own | dict(self.architecture.block_values(self, layer))

    @property
    def output_weight(self) -> str:
        """The name of the weight that gives the logits."""
        return self.architecture.weight_with_role("embedding" if self.tied else "output")

    @property
    def parameter_count(self) -> int:
        """The number of parameters."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def attention_mask(self, layer: int) -> AttentionMask:
        """Return what the queries of a block see."""
        return self.architecture.attention_mask(self, layer)

    def kv_block(self, layer: int) -> int:
        """Return the block whose keys and values a block reads: itself, or an earlier one."""
        return self.architecture.kv_block(self, layer)

    @cached_property
    def kv_blocks(self) -> tuple[int, ...]:
        """The blocks that have keys and values of their own."""
        return tuple(
            layer
            for layer in range(self.layers)
            if self.kv_block(layer) == layer and self.architecture.attends(self, layer)
        )

    @cached_property
    def is_recurrent(self) -> bool:
        """True if a block has a state that each token changes."""
        return any(self.architecture.states(self, layer) for layer in range(self.layers))

    @property
    def logit_cap(self) -> float:
        """The soft cap of logits; 0 means none."""
        return self.architecture.logit_cap(self)

    @property
    def rotates_halves(self) -> bool:
        """True if element i of a head rotates with i + size/2, False if 2i rotates with 2i + 1."""
        return self.architecture.rotation == "halves"

    @cached_property
    def ropes(self) -> Sequence[Rope]:
        """The rotations that the blocks use."""
        return self.architecture.ropes(self)

    def rope_table(self, positions: int) -> np.ndarray:
        """Return the tables of all rotations, one behind the other, for rows of up to `positions` tokens.

        A wider rotation has several rows for each position (see `table_pairs`).
        """
        return self._join_tables([each.table(positions) for each in self.ropes])

    def rope_shift(self, distance: int, positions: int) -> np.ndarray:
        """Return, for each rotation, the cosines and sines of moving a vector by `distance` positions."""
        return self._join_tables([each.shift(distance, positions) for each in self.ropes])

    @property
    def table_pairs(self) -> int:
        """The pairs in a row of the table of all rotations: a number that divides those of each rotation."""
        return math.gcd(*(each.size // 2 for each in self.ropes))

    def _join_tables(self, tables: Sequence[np.ndarray]) -> np.ndarray:
        """Concatenate tables in the layout that the op `rope` expects."""
        if self.rotates_halves:
            tables = [np.ascontiguousarray(table.swapaxes(1, 2)) for table in tables]
        axes = (-1, 2, self.table_pairs) if self.rotates_halves else (-1, self.table_pairs, 2)
        return np.concatenate([table.reshape(axes) for table in tables])

    def describe(self) -> str:
        """Return the architecture and the sizes in one line."""
        heads = f"{self.heads} heads" + (f" ({self.kv_heads} kv)" if self.kv_heads != self.heads else "")
        tied = ", tied embeddings" if self.tied else ""
        least = min(self.by_block.get("ff", (self.ff,)))
        ff = f"{self.ff}" if least == self.ff else f"{least} to {self.ff}"
        sizes = f"{self.layers} layers, {self.embd} wide, {heads}, ff {ff}, vocabulary {self.vocab}"
        return f"{self.architecture.name}, {sizes}{tied}"

    def metadata(self, name: str) -> dict[str, Value]:
        """Return the metadata of a model file, without the tokenizer's."""
        kinds = {int: u32, float: f32, bool: boolean}
        own_values = {**vars(self), **self.extra, **self.by_block}
        values = {
            key: (key_spec, key_spec.stored_value(own_values))
            for key, key_spec in self.architecture.keys.items()
        }
        keys = {
            key: numbers(key_spec.array_kind, value)
            if isinstance(value, tuple)
            else kinds[key_spec.kind](value)
            for key, (key_spec, value) in values.items()
            if value or key_spec.default != 0
        }
        keys |= {"vocab_size": u32(self.vocab), **self.rope.metadata()}
        architecture = self.architecture.name
        general = {
            "architecture": string(architecture),
            "type": string("model"),
            "name": string(name),
            "file_type": u32(ALL_F32),
        }
        lists = {
            each.full_key(architecture, key): numbers(ARRAY_KINDS[each.kind], self.lists[each.field])
            for key, each in self.architecture.lists.items()
        }
        own = {f"{architecture}.{key}": value for key, value in keys.items()}
        return {f"general.{key}": value for key, value in general.items()} | own | lists


COMMON_FIELDS = frozenset(each.name for each in fields(Hyperparameters))


def default_extra(
    architecture: Architecture[Hyperparameters, Any], sizes: Mapping[str, int]
) -> dict[str, float]:
    """Return a new model's values of the hyperparameters that few architectures have."""
    keys = {
        key.field: key
        for key in architecture.keys.values()
        if key.field not in COMMON_FIELDS and not key.by_block and not key.is_left_out
    }
    values = {name: architecture.new_model_values.get(name) for name in keys}
    return {
        name: keys[name].default_value({}) if value is None else value(sizes) if callable(value) else value
        for name, value in values.items()
    }


def default_lists(
    architecture: Architecture[Hyperparameters, Any], layers: int, head_size: int
) -> dict[str, tuple[float, ...]]:
    """Return a new model's lists of numbers that few architectures have."""
    return {each.field: each.initial(layers, head_size) for each in architecture.lists.values()}


# ---- from a file -----------------------------------------------------------


def read_hyperparameters(gguf: Gguf) -> Hyperparameters:
    """Read the model in a file, and check that its tensors match."""
    if gguf.kind not in ("model", "checkpoint"):
        kinds = {"other": "neither a model nor an adapter", "adapter": "an adapter, not a model"}
        kinds["importance matrix"] = "an importance matrix, not a model"
        raise FileError(
            f"{gguf.path}: {kinds.get(gguf.kind, f'a {gguf.kind}, not a model')}; a model is needed",
            code="not-a-model",
        )
    try:
        architecture = find_architecture(gguf.get_value("general.architecture", str))
    except UsageError as error:
        raise FileError(f"{gguf.path}: {error}", code=error.code) from None
    if gguf.metadata.get_text("training.type") == "finetune_lora":
        hint = (
            f"llamatrain finetune --resume {gguf.path} --only-write-lora writes the adapter, which "
            "--lora takes"
        )
        raise FileError(f"{gguf.path}: a checkpoint of an adapter, not a model; {hint}", code="not-a-model")
    try:
        h = read_unchecked_hyperparameters(gguf, architecture)
        h.for_block(0)  # check the sizes of each block
    except BadHyperparameter as error:
        raise FileError(
            f"{gguf.path}: {error.describe(_describe_source(architecture, error.field))}", code=error.code
        ) from None
    check_tensors(gguf, h)
    return h


def read_text_model(gguf: Gguf) -> Hyperparameters:
    """Read the model in a file, which must be one that predicts text."""
    h = read_hyperparameters(gguf)
    check_predicts_text(h, gguf.path)
    return h


def check_predicts_text(h: Hyperparameters, path: object) -> None:
    """Raise FileError if a model predicts no text."""
    if not h.architecture.causal:
        raise FileError(
            f"{path}: a model that predicts text is needed (got {h.architecture.name}, which is for "
            "embeddings); use another model",
            code="predicts-no-text",
        )


def read_unchecked_hyperparameters(
    gguf: Gguf, architecture: Architecture[Hyperparameters, Any]
) -> Hyperparameters:
    """Read the model in a file, without a check of its tensors but the embeddings. It may raise BadHyperparameter."""
    name, embeddings = architecture.name, architecture.weight_with_role("embedding")
    embedding = gguf.tensors.get(embeddings)
    if embedding is None or len(embedding.shape) != 2:
        raise FileError(f"{gguf.path}: the matrix {embeddings} is missing", code="missing-tensor")
    known: dict[str, Any] = {"vocab": embedding.shape[0]}
    by_block: dict[str, tuple[Any, ...]] = {}
    for key, each in architecture.keys.items():
        value = each.read(gguf, f"{name}.{key}", known)
        if each.by_block and each.field not in COMMON_FIELDS and not isinstance(value, tuple):
            value = (value,) * min(known["layers"], MAX_LAYERS)
        if isinstance(value, tuple):
            by_block[each.field] = value
            value = max(value)
        if each.field not in COMMON_FIELDS and not each.min_value <= value <= each.max_value:
            raise FileError(
                f"{gguf.path}: {name}.{key} must be {each.min_value:g} to {each.max_value:g} (got {value})",
                code="invalid-hyperparameter",
            )
        if each.field in known and known[each.field] != value:
            other = f"{_describe_source(architecture, each.field)} {known[each.field]}"
            raise FileError(
                f"{gguf.path}: {name}.{key} is {value} and {other}; only equal values are supported",
                code="unsupported-model",
            )
        known[each.field] = value
    for key, (supported, what) in architecture.supported_values.items():
        is_list = isinstance(gguf.metadata.get(f"{name}.{key}"), list | np.ndarray)
        if is_list or gguf.get_value(f"{name}.{key}", type(supported), supported) != supported:
            raise FileError(f"{gguf.path}: {name}.{key}: {what} is not supported", code="unsupported-model")
    check_window_rope(gguf, architecture, known["head_size"])
    left_out = {each.field for each in architecture.keys.values() if each.is_left_out}
    return Hyperparameters(
        architecture=architecture,
        rope=Rope.read(gguf, name, known["head_size"], known["ctx"]),
        tied=OUTPUT not in gguf.tensors if architecture.tied is None else architecture.tied,
        optional_weights=find_optional(gguf, architecture, known["layers"]),
        extra={
            field: value
            for field, value in known.items()
            if field not in COMMON_FIELDS and field not in by_block and (value or field not in left_out)
        },
        by_block={
            field: values
            for field, values in by_block.items()
            if len({*values}) > 1 or field not in COMMON_FIELDS
        },
        lists={
            each.field: each.read(gguf, each.full_key(name, key), known)
            for key, each in architecture.lists.items()
        },
        **{field: value for field, value in known.items() if field in COMMON_FIELDS},
    )


def find_optional(
    gguf: Gguf, architecture: Architecture[Hyperparameters, Any], layers: int
) -> frozenset[str]:
    """Return the optional weights in a file: the pattern if all blocks have one, else the names."""
    names: dict[str, list[str]] = {}
    for name in gguf.tensors:
        names.setdefault(split_block_number(name)[0], []).append(name)
    found: set[str] = set()
    for pattern, kind in architecture.weights.items():
        if kind.optional and pattern in names:
            differs = kind.optional_by_block and len(names[pattern]) != layers
            found |= {*names[pattern]} if differs else {pattern}
    return frozenset(found)


def check_window_rope(gguf: Gguf, architecture: Architecture[Hyperparameters, Any], head_size: int) -> None:
    """Raise FileError if blocks with windows rotate another number of elements than the architecture knows."""
    name, key = architecture.name, rope.WINDOW_ROPE_SIZE
    if key in architecture.keys:
        return
    size = gguf.get_value(f"{name}.{rope.KEYS['size']}", int, head_size)
    if (window_size := gguf.get_value(f"{name}.{key}", int, size)) != size:
        raise FileError(
            f"{gguf.path}: {name}.{key} must be {size}, like other heads (got {window_size})",
            code="unsupported-model",
        )


def _describe_source(architecture: Architecture[Hyperparameters, Any], field: str) -> str:
    """Return the key or tensor of a file that a hyperparameter comes from."""
    if field == "vocab":
        return f"the first axis of {architecture.weight_with_role('embedding')}"
    if field in rope.TENSORS:
        return rope.TENSORS[field]
    key = rope.KEYS.get(field) or next(key for key, each in architecture.keys.items() if each.field == field)
    return f"{architecture.name}.{key}"


def check_tensors(gguf: Gguf, h: Hyperparameters) -> None:
    """Raise FileError if a weight is missing, has another shape, or is unknown but belongs to the model.

    A block may have a weight that it does not need: converters keep those of checkpoints.
    """
    for name, shape in h.shapes.items():
        tensor = gguf.tensors.get(name)
        if tensor is None:
            raise FileError(f"{gguf.path}: {name} is missing", code="missing-tensor")
        vector = (1, *shape) if len(shape) == 1 else shape  # some converters write a matrix with one row
        if tensor.shape not in (shape, vector):
            raise FileError(
                f"{gguf.path}: the shape of {name} must be {list(shape)} (got {list(tensor.shape)})",
                code="wrong-tensor-shape",
            )
    for name in unused_tensors(gguf, h):
        if is_model_tensor(name) and not is_kept(name, h):
            raise FileError(
                f"{gguf.path}: {quote(name)} is not a weight of a {h.architecture.name}",
                code="unknown-tensor",
            )


def unused_tensors(gguf: Gguf, h: Hyperparameters) -> list[str]:
    """Return the names of tensors that the model does not use."""
    known = {*h.shapes, *rope.TENSORS.values()}
    if gguf.kind == "checkpoint":
        known |= {f"{name}.{part}" for name in h.shapes for part in ("lora_a", "lora_b", "log")}
    return [
        name
        for name in gguf.tensors
        if name not in known and not name.startswith(("optimizer.", "training."))
    ]


def untrained_tensors(gguf: Gguf, h: Hyperparameters) -> list[str]:
    """Return the names of a model's tensors that are never trained: constants, and those that are only kept."""
    constants = [name for name, kind in h.weight_kinds() if kind.role == "constant"]
    return constants + [name for name in unused_tensors(gguf, h) if is_kept(name, h)]


def describe_unused(names: Sequence[str], consequence: str) -> str:
    """Return a warning about tensors that the model does not use."""
    first = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    return f"{first}: no part of the model as it is known here; {consequence}"


def is_kept(name: str, h: Hyperparameters) -> bool:
    """Return True if an unused tensor belongs to the file: of a kept block, or a weight that only others need."""
    kind, number = h.architecture.weight_kind(name), split_block_number(name)[1]
    present = kind.present if kind else None
    unneeded = present is not None and any(present(h, layer) for layer in range(h.layers))
    return unneeded or (number is not None and h.architecture.is_kept(h, int(number)))


def is_model_tensor(name: str) -> bool:
    """Return True if a tensor's name shows that the model would need it."""
    return name.startswith(("blk.", "token_", "position_", "output")) and not split_block_number(name)[
        0
    ].startswith(IGNORED_TENSORS)


def unused_keys(gguf: Gguf, h: Hyperparameters) -> list[str]:
    """Return the metadata keys of the architecture that are not used."""
    architecture = h.architecture
    known = {
        *architecture.keys,
        *architecture.supported_values,
        *architecture.lists,
        *rope.KEYS.values(),
        "vocab_size",
        "rope.scale_linear",
    }
    return [
        key
        for key in gguf.metadata
        if key.startswith(f"{architecture.name}.") and key.partition(".")[2] not in known
    ]


def tokenizer_metadata(metadata: Mapping[str, Value]) -> dict[str, Value]:
    """Return the metadata of the tokenizer."""
    return {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
