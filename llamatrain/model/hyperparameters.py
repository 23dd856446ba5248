"""What a llama is made of, in numbers: from a GGUF file's metadata or from options, and back into metadata."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from llamatrain.errors import FileError, UsageError
from llamatrain.files.reader import Gguf
from llamatrain.files.values import Value, f32, string, u32
from llamatrain.model.rope import Rope, as_kept

ARCHITECTURE = "llama"
LARGEST = 1 << 24  # of any size: what lies beyond is a damaged file or a slip of the hand
DEEPEST = 1 << 12  # layers
ALL_F32 = 0  # general.file_type


@dataclass(frozen=True)
class Hyperparameters:
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "rms_eps", as_kept(self.rms_eps))
        for name in ("vocab", "embd", "layers", "heads", "kv_heads", "ff", "ctx", "head_size"):
            value, most = getattr(self, name), DEEPEST if name == "layers" else LARGEST
            if not 1 <= value <= most:
                raise UsageError(f"{name} is {value}; a llama takes 1 to {most}")
        if self.heads % self.kv_heads:
            raise UsageError(f"{self.heads} heads do not divide among {self.kv_heads} key/value heads")
        if self.rope.size % 2 or not 0 < self.rope.size <= self.head_size:
            raise UsageError(f"{self.rope.size} of {self.head_size} elements of a head cannot be rotated; they turn in pairs")
        if not 0 < self.rms_eps < 1:
            raise UsageError(f"an epsilon of {self.rms_eps:g} in its norms must lie between 0 and 1, such as 1e-5")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight by its GGUF name, in the file's order; matrices are (out, in)."""
        width, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        made: dict[str, tuple[int, ...]] = {"token_embd": (self.vocab, self.embd)}
        for layer in range(self.layers):
            block = {
                "attn_norm": (self.embd,),
                "attn_q": (width, self.embd),
                "attn_k": (kv, self.embd),
                "attn_v": (kv, self.embd),
                "attn_output": (self.embd, width),
                "ffn_norm": (self.embd,),
                "ffn_gate": (self.ff, self.embd),
                "ffn_up": (self.ff, self.embd),
                "ffn_down": (self.embd, self.ff),
            }
            made.update({f"blk.{layer}.{name}": shape for name, shape in block.items()})
        made["output_norm"] = (self.embd,)
        if not self.tied:
            made["output"] = (self.vocab, self.embd)
        return {f"{name}.weight": shape for name, shape in made.items()}

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def describe(self) -> str:
        heads = f"{self.heads} heads" + (f" ({self.kv_heads} kv)" if self.kv_heads != self.heads else "")
        tied = ", tied embeddings" if self.tied else ""
        return f"llama, {self.layers} layers, {self.embd} wide, {heads}, ff {self.ff}, vocabulary {self.vocab}{tied}"

    def metadata(self, name: str) -> dict[str, Value]:
        """The keys of a model file, less those of its tokenizer."""
        keys = {
            "context_length": u32(self.ctx),
            "embedding_length": u32(self.embd),
            "block_count": u32(self.layers),
            "feed_forward_length": u32(self.ff),
            "attention.head_count": u32(self.heads),
            "attention.head_count_kv": u32(self.kv_heads),
            "attention.key_length": u32(self.head_size),
            "attention.value_length": u32(self.head_size),
            "attention.layer_norm_rms_epsilon": f32(self.rms_eps),
            "vocab_size": u32(self.vocab),
            **self.rope.metadata(),
        }
        general = {"architecture": string(ARCHITECTURE), "type": string("model"), "name": string(name), "file_type": u32(ALL_F32)}
        return {f"general.{key}": value for key, value in general.items()} | {
            f"{ARCHITECTURE}.{key}": value for key, value in keys.items()
        }


# ---- from a file -----------------------------------------------------------


def read(gguf: Gguf) -> Hyperparameters:
    """The model in a file, whose tensors must be those that it says."""
    if gguf.kind not in ("model", "checkpoint"):
        kinds = {"other": "neither a model nor an adapter", "adapter": "no model but an adapter"}
        raise FileError(f"{gguf.path}: {kinds.get(gguf.kind, f'no model but a {gguf.kind}')}; a model is needed")
    architecture = gguf.value("general.architecture", str)
    if architecture != ARCHITECTURE:
        raise FileError(f"{gguf.path}: the architecture {architecture!r} is not supported; {ARCHITECTURE} is")
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise FileError(f"{gguf.path}: token_embd.weight, a matrix, is not among its tensors")
    try:
        found = _read(gguf, embedding.shape[0])
    except UsageError as error:
        raise FileError(f"{gguf.path}: {error}") from None
    check_tensors(gguf, found)
    return found


def _read(gguf: Gguf, vocab: int) -> Hyperparameters:
    def number(key: str, default: int | None = None) -> int:
        return gguf.value(f"{ARCHITECTURE}.{key}", int, default)

    embd, heads, ctx = number("embedding_length"), number("attention.head_count"), number("context_length", 2048)
    if heads < 1:
        raise UsageError(f"{heads} attention heads cannot be")
    head_size = number("attention.key_length", embd // heads)
    if number("attention.value_length", head_size) != head_size:
        raise UsageError(f"keys of {head_size} and values of another length in a head are not supported")
    if number("expert_count", 0) > 0:
        raise UsageError("a mixture of experts is not supported")
    return Hyperparameters(
        vocab, embd, number("block_count"), heads, number("attention.head_count_kv", heads), number("feed_forward_length"), ctx,
        head_size, Rope.read(gguf, ARCHITECTURE, head_size, ctx),
        gguf.value(f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon", float, 1e-5), "output.weight" not in gguf.tensors,
    )  # fmt: skip


def check_tensors(gguf: Gguf, found: Hyperparameters) -> None:
    """No weight is missing, has another shape, or is there that this program would leave out."""
    for name, shape in found.shapes.items():
        tensor = gguf.tensors.get(name)
        if tensor is None:
            raise FileError(f"{gguf.path}: {name} is missing")
        if tensor.shape != shape:
            raise FileError(f"{gguf.path}: {name} is {list(tensor.shape)}, where {list(shape)} is needed")
    own = ("optimizer.", "training.")
    strange = [
        name for name in gguf.tensors if name not in found.shapes and name != "rope_freqs.weight" and not name.startswith(own)
    ]
    if strange:
        raise FileError(f"{gguf.path}: has {strange[0]}, which is no weight of the llamas that are supported")


def vocabulary_of(metadata: Mapping[str, Value]) -> dict[str, Value]:
    """The keys that tell of the tokenizer."""
    return {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
