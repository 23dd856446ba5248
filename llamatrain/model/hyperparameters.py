"""What a model is made of, in numbers: from a GGUF file's metadata or from options, and back into metadata."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from llamatrain.errors import FileError, UsageError
from llamatrain.files.constants import LlamaFileType
from llamatrain.files.cursor import quoted
from llamatrain.files.reader import Gguf
from llamatrain.files.values import Value, f32, string, u32
from llamatrain.model import rope
from llamatrain.model.architecture import Architecture, Shape, WeightKind
from llamatrain.model.architectures import find
from llamatrain.model.rope import FACTORS, Rope, as_kept
from llamatrain.model.unfit import DEEPEST, LARGEST, Unfit

ALL_F32 = LlamaFileType.ALL_F32  # general.file_type


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """Bases are known again in checkpoints by the repr of their numbers: it stays as it is."""

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
    tied: bool = False  # the embeddings serve as output, too
    architecture: Architecture["Hyperparameters", Any] = field(repr=False)
    own: Mapping[str, float] = field(default_factory=dict, repr=False, hash=False)  # numbers that few architectures have

    def __post_init__(self) -> None:
        object.__setattr__(self, "rms_eps", as_kept(self.rms_eps))
        for name in ("vocab", "embd", "layers", "heads", "kv_heads", "ff", "ctx", "head_size"):
            value, most = getattr(self, name), DEEPEST if name == "layers" else LARGEST
            if not 1 <= value <= most:
                raise Unfit(name, f"{value}", f"it takes 1 to {most}")
        if self.heads % self.kv_heads:
            raise Unfit("kv_heads", f"{self.kv_heads}", f"it takes what divides the {self.heads} heads")
        if self.rope.size % 2 or not 0 < self.rope.size <= self.head_size:
            raise Unfit("size", f"{self.rope.size}", f"the {self.head_size} elements of a head turn in pairs, all or some")
        if not 0 < self.rms_eps < 1:
            raise Unfit("rms_eps", f"{self.rms_eps:g}", "it lies between 0 and 1, such as 1e-5")

    @property
    def width(self) -> int:
        """Of all heads."""
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_size

    @property
    def shapes(self) -> dict[str, Shape]:
        """Every weight by its GGUF name, in the file's order; matrices are (out, in)."""
        return {name: kind.shape(self) for name, kind in self.architecture.kinds(self.layers, self.tied)}

    def kind(self, name: str) -> WeightKind["Hyperparameters"]:
        """Of one of its weights."""
        found = self.architecture.kind(name)
        assert found, name
        return found

    @property
    def output(self) -> str:
        """The weight that gives logits."""
        return self.architecture.the("embedding" if self.tied else "output")

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def describe(self) -> str:
        heads = f"{self.heads} heads" + (f" ({self.kv_heads} kv)" if self.kv_heads != self.heads else "")
        tied = ", tied embeddings" if self.tied else ""
        sizes = f"{self.layers} layers, {self.embd} wide, {heads}, ff {self.ff}, vocabulary {self.vocab}"
        return f"{self.architecture.name}, {sizes}{tied}"

    def metadata(self, name: str) -> dict[str, Value]:
        """The keys of a model file, less those of its tokenizer."""
        kinds = {int: u32, float: f32}
        numbers = {**vars(self), **self.own}
        keys = {key: kinds[each.kind](numbers[each.field]) for key, each in self.architecture.keys.items()}
        keys |= {"vocab_size": u32(self.vocab), **self.rope.metadata()}
        said = self.architecture.name
        general = {"architecture": string(said), "type": string("model"), "name": string(name), "file_type": u32(ALL_F32)}
        return {f"general.{key}": value for key, value in general.items()} | {
            f"{said}.{key}": value for key, value in keys.items()
        }


# ---- from a file -----------------------------------------------------------


def read(gguf: Gguf) -> Hyperparameters:
    """The model in a file, whose tensors must be those that it says."""
    if gguf.kind not in ("model", "checkpoint"):
        kinds = {"other": "neither a model nor an adapter", "adapter": "no model but an adapter"}
        raise FileError(f"{gguf.path}: {kinds.get(gguf.kind, f'no model but a {gguf.kind}')}; a model is needed")
    try:
        architecture = find(gguf.value("general.architecture", str))
    except UsageError as error:
        raise FileError(f"{gguf.path}: {error}") from None
    try:
        found = _read(gguf, architecture)
    except Unfit as error:
        raise FileError(f"{gguf.path}: {error.named(_key_of(architecture, error.field))}") from None
    check_tensors(gguf, found)
    return found


def _read(gguf: Gguf, architecture: Architecture[Hyperparameters, Any]) -> Hyperparameters:
    name, embeddings = architecture.name, architecture.the("embedding")
    embedding = gguf.tensors.get(embeddings)
    if embedding is None or len(embedding.shape) != 2:
        raise FileError(f"{gguf.path}: {embeddings}, a matrix, is not among its tensors")
    known: dict[str, Any] = {"vocab": embedding.shape[0]}
    for key, each in architecture.keys.items():
        value = gguf.value(f"{name}.{key}", each.kind, each.missing(known))
        if each.field in known and known[each.field] != value:
            other = f"{_key_of(architecture, each.field)} {known[each.field]}"
            raise FileError(f"{gguf.path}: {name}.{key} is {value} and {other}: only alike they are supported")
        known[each.field] = value
    for key, what in architecture.refused.items():
        if gguf.value(f"{name}.{key}", int, 0):
            raise FileError(f"{gguf.path}: {name}.{key}: {what} is not supported")
    common = {each.name for each in fields(Hyperparameters)}
    return Hyperparameters(
        architecture=architecture,
        rope=Rope.read(gguf, name, known["head_size"], known["ctx"]),
        tied=architecture.the("output") not in gguf.tensors,
        own={field: value for field, value in known.items() if field not in common},
        **{field: value for field, value in known.items() if field in common},
    )


def _key_of(architecture: Architecture[Hyperparameters, Any], field: str) -> str:
    """Where a file says a number."""
    if field == "vocab":
        return f"the first axis of {architecture.the('embedding')}"
    if field == "factors":
        return FACTORS
    key = rope.KEYS.get(field) or next(key for key, each in architecture.keys.items() if each.field == field)
    return f"{architecture.name}.{key}"


def check_tensors(gguf: Gguf, found: Hyperparameters) -> None:
    """No weight is missing, has another shape, or is there that this program would leave out."""
    shapes = found.shapes
    for name, shape in shapes.items():
        tensor = gguf.tensors.get(name)
        if tensor is None:
            raise FileError(f"{gguf.path}: {name} is missing")
        if tensor.shape != shape:
            raise FileError(f"{gguf.path}: {name} is {list(tensor.shape)}, where {list(shape)} is needed")
    own = ("optimizer.", "training.")
    beside = {FACTORS} | {f"{name}.lora_{half}" for name in shapes for half in "ab" if gguf.kind == "checkpoint"}
    strange = [name for name in gguf.tensors if name not in shapes and name not in beside and not name.startswith(own)]
    if strange:
        raise FileError(f"{gguf.path}: has {quoted(strange[0])}, which is no weight of a {found.architecture.name}")


def vocabulary_of(metadata: Mapping[str, Value]) -> dict[str, Value]:
    """The keys that tell of the tokenizer."""
    return {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
