"""Small models of each architecture with random weights, in files as llama.cpp's converter writes them: by public facts alone.

Each architecture has three shapes: grouped heads and heads of their own, tied and not, rows longer than windows and than the
context before long factors, and every multiplier, cap and base unlike its default. Biases and norms are not 0 and 1.
"""

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import gguf
import numpy as np

Arrays = dict[str, np.ndarray]
CTX = 64
WORDS = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
VOCABULARY = len(WORDS)
CONTROL = 3  # tokens that are not bytes, before those that are


@dataclass(frozen=True, kw_only=True)
class Shape:
    arch: str
    embd: int = 48
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 12
    ff: int = 56
    tied: bool = False
    eps: float = 1e-5
    base: float = 10000.0
    turned: int = 0  # elements of a head that are rotated; 0: all
    window: int = 0
    score_cap: float = 0.0
    logit_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    score_scale: float = 0.0  # 0: one over the root of the size of a head
    original_ctx: int = CTX
    long: tuple[float, ...] = ()
    short: tuple[float, ...] = ()
    ctx: int = CTX
    vocab: int = field(default=VOCABULARY)

    @property
    def width(self) -> int:
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_size

    @property
    def qkv(self) -> int:
        return self.width + 2 * self.kv_width

    @property
    def ff2(self) -> int:
        return 2 * self.ff

    @property
    def length(self) -> float:
        """What long factors make of a rotated vector (Ding et al. 2024)."""
        scale = self.ctx / self.original_ctx
        return math.sqrt(1 + math.log(scale) / math.log(self.original_ctx)) if scale > 1 else 1.0


# ---- weights: GGUF's name, Hugging Face's, and the shape --------------------

Row = tuple[str, str, str]
EMBEDDINGS, OUTPUT = "token_embd.weight", "output.weight"
ENDS = [
    (EMBEDDINGS, "model.embed_tokens.weight", "vocab embd"),
    ("output_norm.weight", "model.norm.weight", "embd"),
    (OUTPUT, "lm_head.weight", "vocab embd"),
]
ATTENTION = [
    ("attn_q.weight", "self_attn.q_proj.weight", "width embd"),
    ("attn_k.weight", "self_attn.k_proj.weight", "kv_width embd"),
    ("attn_v.weight", "self_attn.v_proj.weight", "kv_width embd"),
    ("attn_output.weight", "self_attn.o_proj.weight", "embd width"),
]
FORWARD = [
    ("ffn_gate.weight", "mlp.gate_proj.weight", "ff embd"),
    ("ffn_up.weight", "mlp.up_proj.weight", "ff embd"),
    ("ffn_down.weight", "mlp.down_proj.weight", "embd ff"),
]
BEFORE = [
    ("attn_norm.weight", "input_layernorm.weight", "embd"),
    ("ffn_norm.weight", "post_attention_layernorm.weight", "embd"),
]
BEHIND = [
    ("post_attention_norm.weight", "post_attention_layernorm.weight", "embd"),
    ("post_ffw_norm.weight", "post_feedforward_layernorm.weight", "embd"),
]
AROUND = [
    ("attn_norm.weight", "input_layernorm.weight", "embd"),
    ("ffn_norm.weight", "pre_feedforward_layernorm.weight", "embd"),
    *BEHIND,
]
BIASES = [(f"attn_{x}.bias", f"self_attn.{x}_proj.bias", "width" if x == "q" else "kv_width") for x in "qkv"]
HEAD_NORMS = [(f"attn_{x}_norm.weight", f"self_attn.{x}_norm.weight", "head_size") for x in "qk"]
WIDE_NORMS = [
    ("attn_q_norm.weight", "self_attn.q_norm.weight", "width"),
    ("attn_k_norm.weight", "self_attn.k_norm.weight", "kv_width"),
]
FUSED = [
    ("attn_qkv.weight", "self_attn.qkv_proj.weight", "qkv embd"),
    ("attn_output.weight", "self_attn.o_proj.weight", "embd width"),
    ("ffn_up.weight", "mlp.gate_up_proj.weight", "ff2 embd"),
    ("ffn_down.weight", "mlp.down_proj.weight", "embd ff"),
]
BLOCKS: dict[str, list[Row]] = {
    "llama": [*BEFORE, *ATTENTION, *FORWARD],
    "granite": [*BEFORE, *ATTENTION, *FORWARD],
    "smollm3": [*BEFORE, *ATTENTION, *FORWARD],
    "qwen2": [*BEFORE, *ATTENTION, *BIASES, *FORWARD],
    "qwen3": [*BEFORE, *ATTENTION, *HEAD_NORMS, *FORWARD],
    "gemma2": [*AROUND, *ATTENTION, *FORWARD],
    "gemma3": [*AROUND, *ATTENTION, *HEAD_NORMS, *FORWARD],
    "phi3": [*BEFORE, *FUSED],
    "olmo2": [*BEHIND, *ATTENTION, *WIDE_NORMS, *FORWARD],
}
ARCHITECTURES = list(BLOCKS)
PAIRS = (
    "llama",
    "granite",
    "smollm3",
)  # their heads turn in pairs, so that rows of q and k are in another order than theirs
ONE_LESS = ("gemma2", "gemma3")  # Hugging Face keeps what its norms have beside 1


def rows(shape: Shape) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Each weight by GGUF's name: Hugging Face's, and its axes."""
    ends = [row for row in ENDS if not (shape.tied and row[0] == OUTPUT)]
    blocks = [
        (f"blk.{layer}.{mine}", f"model.layers.{layer}.{theirs}", axes)
        for layer in range(shape.layers)
        for mine, theirs, axes in BLOCKS[shape.arch]
    ]
    return {
        mine: (theirs, tuple(getattr(shape, axis) for axis in axes.split()))
        for mine, theirs, axes in [ends[0], *blocks, *ends[1:]]
    }


def linear(shape: Shape) -> list[str]:
    """The matrices of all blocks."""
    return [name for name, (_, axes) in rows(shape).items() if len(axes) == 2 and name.startswith("blk.")]


def weights(shape: Shape, seed: int = 1, last: float = 2.5) -> Arrays:
    """As GGUF has them. Heads see some tokens more than others, and what is said is `last` times as sure as a new model is."""
    made = {}
    for name, (_, axes) in rows(shape).items():
        random = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(axes, np.float32)
        if len(axes) == 1:
            made[name] = np.float32(0.3) * random + np.float32("norm" in name)
        else:
            gain = 1.0 if name.startswith("blk.") else last
            alone = name == EMBEDDINGS and not shape.tied
            made[name] = random * np.float32(1.0 if alone else gain / math.sqrt(axes[1]))
    return made


# ---- as a file --------------------------------------------------------------


def keys(shape: Shape) -> dict[str, int | float]:
    """What llama.cpp's converter writes behind the architecture's name."""
    found: dict[str, int | float] = {
        "context_length": shape.ctx,
        "embedding_length": shape.embd,
        "block_count": shape.layers,
        "feed_forward_length": shape.ff,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.layer_norm_rms_epsilon": shape.eps,
    }
    if shape.arch != "gemma2":  # its converter writes no base
        found["rope.freq_base"] = shape.base
    if shape.head_size * shape.heads != shape.embd or shape.arch in ("gemma2", "gemma3", "qwen3"):
        found |= {"attention.key_length": shape.head_size, "attention.value_length": shape.head_size}
    if shape.arch in PAIRS:
        found |= {"vocab_size": shape.vocab, "rope.dimension_count": shape.head_size}
    if shape.arch in ("gemma2", "gemma3"):
        found["attention.sliding_window"] = shape.window
    if shape.arch == "gemma2":
        found |= {"attn_logit_softcapping": shape.score_cap, "final_logit_softcapping": shape.logit_cap}
    if shape.arch == "phi3":
        found |= {
            "rope.dimension_count": shape.turned or shape.head_size,
            "attention.sliding_window": shape.window,
        }
        found["rope.scaling.original_context_length"] = shape.original_ctx
        if shape.long:
            found["rope.scaling.attn_factor"] = shape.length
    if shape.arch == "granite":
        found |= {"embedding_scale": shape.embedding_scale, "residual_scale": shape.residual_scale}
        found |= {"attention.scale": shape.score_scale, "logit_scale": shape.logit_scale}
    return found


def written(
    path: Path, shape: Shape, arrays: Arrays, said: Mapping[str, int | float | str] | None = None
) -> Path:
    """A model file with a vocabulary of bytes."""
    out = gguf.GGUFWriter(path, shape.arch)
    out.add_name("small")
    adds = {int: out.add_uint32, float: out.add_float32, str: out.add_string}
    for key, value in (keys(shape) if said is None else said).items():
        adds[type(value)](f"{shape.arch}.{key}", value)
    out.add_tokenizer_model("llama")
    out.add_token_list(WORDS)
    out.add_token_scores([0.0] * VOCABULARY)
    out.add_token_types([2, 3, 3] + [6] * 256)
    out.add_unk_token_id(0)
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_add_space_prefix(False)
    tensors = dict(arrays)
    for name in ("long", "short"):
        if factors := getattr(shape, name):
            tensors[f"rope_factors_{name}.weight"] = np.array(factors, np.float32)
    for name, array in tensors.items():
        out.add_tensor(name, np.ascontiguousarray(array))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


# ---- shapes -----------------------------------------------------------------

LONG, SHORT = (1.0, 1.3, 1.9, 2.6, 3.8, 5.5), (1.0, 1.02, 1.1, 1.2, 1.25, 1.4)


def _three(
    arch: str, first: dict[str, float], second: dict[str, float], third: dict[str, float]
) -> dict[str, Shape]:
    return {name: Shape(arch=arch, **each) for name, each in zip("abc", (first, second, third), strict=True)}  # type: ignore[arg-type]


GROUPED = {"heads": 4, "kv_heads": 2, "head_size": 12, "embd": 48}
OWN = {
    "heads": 4,
    "kv_heads": 1,
    "head_size": 10,
    "embd": 36,
    "ff": 64,
}  # heads wider together than the model
SINGLE = {"heads": 3, "kv_heads": 3, "head_size": 6, "embd": 18, "ff": 40, "layers": 3}
BROAD = {"heads": 2, "kv_heads": 1, "head_size": 80, "embd": 96, "ff": 100}
SHAPES: dict[str, dict[str, Shape]] = {
    "llama": _three("llama", GROUPED, OWN | {"tied": True, "base": 500.0}, SINGLE),
    "qwen2": _three(
        "qwen2",
        GROUPED | {"base": 1e6, "eps": 1e-6},
        {"heads": 4, "kv_heads": 1, "head_size": 10, "embd": 40, "tied": True},
        SINGLE | {"eps": 1e-2},
    ),
    "qwen3": _three(
        "qwen3", GROUPED | {"base": 1e6, "eps": 1e-6}, OWN | {"tied": True}, BROAD | {"base": 500.0}
    ),
    "gemma2": _three(
        "gemma2",
        GROUPED | {"window": 9, "score_cap": 2.0, "logit_cap": 3.0, "layers": 4, "tied": True},
        OWN | {"window": 5, "score_cap": 0.7, "logit_cap": 1.5, "layers": 3, "eps": 1e-6, "tied": True},
        BROAD | {"window": 16, "score_cap": 50.0, "logit_cap": 30.0, "tied": True},
    ),
    "gemma3": _three(
        "gemma3",
        GROUPED | {"window": 9, "base": 1e6, "layers": 7, "tied": True, "eps": 1e-6},
        OWN | {"window": 5, "base": 500.0, "layers": 6, "tied": True},
        BROAD | {"window": 16, "base": 1e6, "tied": True},
    ),
    "phi3": _three(
        "phi3",
        {
            "heads": 3,
            "kv_heads": 1,
            "head_size": 16,
            "embd": 48,
            "turned": 12,
            "original_ctx": 24,
            "long": LONG,
            "short": SHORT,
        },
        SINGLE | {"eps": 1e-6},
        {"heads": 4, "kv_heads": 2, "head_size": 20, "embd": 80, "turned": 10, "tied": True, "base": 500.0},
    ),
    "granite": _three(
        "granite",
        GROUPED | {"embedding_scale": 3.0, "residual_scale": 0.6, "score_scale": 0.41, "logit_scale": 1.7},
        OWN
        | {
            "embedding_scale": 6.0,
            "residual_scale": 0.22,
            "score_scale": 0.1,
            "logit_scale": 0.5,
            "tied": True,
        },
        SINGLE
        | {
            "embedding_scale": 0.5,
            "residual_scale": 1.5,
            "score_scale": 0.7,
            "logit_scale": 3.0,
            "base": 1e6,
        },
    ),
    "olmo2": _three(
        "olmo2",
        GROUPED | {"base": 500000.0, "eps": 1e-6},
        {"heads": 4, "kv_heads": 1, "head_size": 10, "embd": 40},
        SINGLE | {"eps": 1e-2},
    ),
    "smollm3": _three(
        "smollm3",
        GROUPED | {"layers": 5, "base": 2e6, "eps": 1e-6},
        OWN | {"layers": 4, "tied": True},
        SINGLE | {"layers": 8},
    ),
}
CASES = [(arch, name) for arch, shapes in SHAPES.items() for name in shapes]


def shape_of(arch: str, name: str) -> Shape:
    return SHAPES[arch][name]


def wide(arch: str) -> Shape:
    """Of rows that every type can hold."""
    first = SHAPES[arch]["a"]
    sizes = {
        "embd": 256,
        "heads": 4,
        "kv_heads": 2,
        "head_size": 64,
        "ff": 256,
        "layers": 4 if arch == "smollm3" else 2,
    }
    # Rotated in part, a head of another size has other factors.
    return replace(first, **sizes, turned=12 if first.turned else 0)


def prompt(count: int = 40, seed: int = 0) -> list[int]:
    """Tokens that are letters but the first."""
    letters = np.random.default_rng(seed).integers(CONTROL + 0x21, CONTROL + 0x7F, count - 1)
    return [1, *letters.tolist()]
