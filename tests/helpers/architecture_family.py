"""What tests know of an architecture, by public facts alone: shapes, weights under both names, metadata.

Each architecture has a module in `architectures/` that defines `FAMILY`, with three shapes: grouped heads and heads of their
own, tied and not, rows longer than windows and than the context before long factors, and every multiplier, cap and base unlike
its default.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

CTX = 64
WORDS = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
VOCABULARY = len(WORDS)
CONTROL = 3  # tokens that are not bytes, before those that are


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a small model. Families with other sizes derive from it."""

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
    def file_arch(self) -> str:
        """The architecture that a file names."""
        return self.arch

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
        """The factor of rotated vectors with long factors (Ding et al. 2024)."""
        scale = self.ctx / self.original_ctx
        return math.sqrt(1 + math.log(scale) / math.log(self.original_ctx)) if scale > 1 else 1.0


@dataclass(frozen=True, kw_only=True)
class ExpertShape(Shape):
    """The sizes of a model with mixtures of experts."""

    experts: int = 6
    experts_used: int = 2
    expert_ff: int = 24
    joined_stacks: bool = False  # gates and values of experts have one stack

    @property
    def two_expert_ff(self) -> int:
        return 2 * self.expert_ff


@dataclass(frozen=True, kw_only=True)
class DenseAndSharedShape(ExpertShape):
    """The sizes of a model whose first blocks have no experts, and others some that all tokens use."""

    dense_blocks: int = 1
    shared: int = 1

    @property
    def shared_ff(self) -> int:
        """The width of all experts together that all tokens use."""
        return self.shared * self.expert_ff


# ---- weights: GGUF's name, Hugging Face's, and the axes as attributes of a shape ----
# In Hugging Face's name, * stands for the numbers of a stack, and #1 for the second part of the rows.

Row = tuple[str, str, str]
Convert = Callable[[Shape, str, np.ndarray], np.ndarray]  # the shape, GGUF's name, and the array
EMBEDDINGS, OUTPUT = "token_embd.weight", "output.weight"
ENDS = [
    (EMBEDDINGS, "model.embed_tokens.weight", "vocab embd"),
    ("output_norm.weight", "model.norm.weight", "embd"),
    (OUTPUT, "lm_head.weight", "vocab embd"),
]
VISION_ENDS = [(mine, theirs.replace("model.", "model.language_model."), axes) for mine, theirs, axes in ENDS]
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
UNGATED = FORWARD[1:]


def expert_rows(gate: str = "mlp.gate", stack: str = "mlp.experts", inner: str = "expert_ff") -> list[Row]:
    """Return the router and the experts of a block, by the names of their modules and the axis of their width."""
    return [
        ("ffn_gate_inp.weight", f"{gate}.weight", "experts embd"),
        ("ffn_gate_exps.weight", f"{stack}.gate_up_proj#0", f"experts {inner} embd"),
        ("ffn_up_exps.weight", f"{stack}.gate_up_proj#1", f"experts {inner} embd"),
        ("ffn_down_exps.weight", f"{stack}.down_proj", f"experts embd {inner}"),
    ]


def shared_rows(module: str) -> list[Row]:
    """Return the expert that all tokens use, by the name of its module."""
    return [
        ("ffn_gate_shexp.weight", f"{module}.gate_proj.weight", "shared_ff embd"),
        ("ffn_up_shexp.weight", f"{module}.up_proj.weight", "shared_ff embd"),
        ("ffn_down_shexp.weight", f"{module}.down_proj.weight", "embd shared_ff"),
    ]


def join_stacks(shape: Any, rows: Sequence[Row]) -> list[Row]:
    """Return the rows of a block, in which the shape may want one stack for gates and values."""
    if not shape.joined_stacks:
        return [*rows]
    found = []
    for mine, theirs, axes in rows:
        if mine == "ffn_gate_exps.weight":
            found.append(("ffn_gate_up_exps.weight", theirs.removesuffix("#0"), "experts two_expert_ff embd"))
        elif mine != "ffn_up_exps.weight":
            found.append((mine, theirs, axes))
    return found


EXPERTS = expert_rows()
LAYERS_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")  # of single experts, in most models
ROUTER, SCORE_BIAS = "ffn_gate_inp.weight", "exp_probs_b.bias"
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

# of Hugging Face's models, of which some have a list of norms
NORMS_OF_EACH_HEAD = [
    ("attn_q_norm.weight", "self_attn.q_norm.weight", "heads head_size"),
    ("attn_k_norm.weight", "self_attn.k_norm.weight", "kv_heads head_size"),
]


def layer_norms(norms: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Return norms of a block with biases, and the ends of a model whose last norm has one."""
    both = [
        row
        for mine, theirs, axes in norms
        for row in (
            (mine, theirs, axes),
            (mine.replace("weight", "bias"), theirs.replace("weight", "bias"), axes),
        )
    ]
    return both, [*ENDS[:2], ("output_norm.bias", "model.norm.bias", "embd"), *ENDS[2:]]


Numbers = dict[str, int | float]


def nothing(shape: Shape) -> dict[str, Any]:
    """Return no keys or settings beside the common ones."""
    return {}


def unchanged(shape: Shape, name: str, array: np.ndarray) -> np.ndarray:
    """Return a weight that is the same in Hugging Face's model."""
    return array


def initial_norms_of_each_head(
    shape: Shape, name: str, axes: tuple[int, ...], random: np.random.Generator
) -> np.ndarray | None:
    """Return norms near 1, though they are matrices."""
    if not name.endswith(tuple(mine for mine, _, _ in NORMS_OF_EACH_HEAD)):
        return None
    return np.float32(1) + np.float32(0.3) * random.standard_normal(axes, np.float32)


@dataclass(frozen=True, kw_only=True)
class Family:
    """An architecture in files and in Hugging Face's library."""

    block: (
        Sequence[Row] | Callable[[Shape, int], Sequence[Row]]
    )  # the weights of a block; a function if blocks differ
    shapes: Mapping[str, Shape]
    config: str  # Hugging Face's classes
    model: str
    # embeddings first; the output weight is left out if it is tied
    ends: Sequence[Row] | Callable[[Any], Sequence[Row]] = tuple(ENDS)
    # ends of names of block matrices that llama.cpp applies no adapter to, or that get none by default
    without_adapter: tuple[str, ...] = ()
    stacks_without_adapter: tuple[str, ...] = ()  # ends of names of stacks of experts that get none
    # ends of names of block matrices that PEFT has no adapters of: it refuses them, or they share a module
    not_in_peft: tuple[str, ...] = ()
    # PEFT takes linear layers with the names of single experts' for these, and finds the right ones by their weights
    adapts_by_weight: bool = False
    single_experts: tuple[str, str, str] = LAYERS_OF_EXPERTS  # names of their layers, in most checkpoints
    constants: tuple[str, ...] = ()  # ends of names of weights that are never trained
    tensors: Callable[[Any], dict[str, np.ndarray]] = nothing  # tensors of a file that are no weights
    wide: Mapping[str, int] = field(default_factory=dict)  # further sizes of a shape whose rows are wide
    pairs: bool = (
        False  # heads rotate in pairs, so that rows of q and k are in another order than Hugging Face's
    )
    norms_less_one: bool = False  # Hugging Face keeps norms less 1
    half_float_gelu: bool = False  # llama.cpp looks up its activation in a table of half floats
    gelu_error: float = 5e-5  # the mean of what is left of logits where ours has such a table too
    keys: Callable[[Any], Numbers] = nothing  # metadata that replaces or joins the common keys
    dropped_keys: Callable[[Any], set[str]] = lambda shape: (
        set()
    )  # common keys that the converter does not write
    whole_keys: Callable[[str], bool] = lambda key: False  # keys without the architecture's name
    settings: Callable[[Any], dict[str, Any]] = nothing  # the same of the configuration
    # what Hugging Face's model keeps with its weights, and does not train here
    their_constants: Callable[[Any], dict[str, np.ndarray]] = nothing
    vision: Mapping[str, Any] | None = None  # the configuration of the vision model around it
    to_theirs: Convert = unchanged  # beside the order of rows and norms less 1
    gradient_to_ours: Convert = (
        unchanged  # the gradient with respect to GGUF's weight, by that of Hugging Face's
    )
    # the same for whole weights of Hugging Face's model, after the parts of each were joined
    whole_to_theirs: Convert = unchanged
    whole_to_ours: Convert = unchanged
    # the rows of Hugging Face's weight that are a part of it, if parts do not follow each other
    part_rows: Callable[[Any, str], np.ndarray | None] = lambda shape, name: None
    # changes Hugging Face's library where it has a constant instead of a number of the model
    adjust: Callable[[Any], None] = lambda shape: None
    # the order of the inputs of a weight in Hugging Face's model, if that is another
    input_order: Callable[[Any, str], np.ndarray | None] = lambda shape, name: None
    # by the name in Hugging Face's model, the order of the outputs of a weight, if ours do not follow each other there
    output_order: Callable[[Any, str], np.ndarray | None] = lambda shape, theirs: None
    # the shape that llama.cpp is compared with, if it does not take a smaller one
    llama_cpp_shape: Callable[[Any], Any] = lambda shape: shape
    predicts_text: bool = True  # else it is for embeddings, and has other tests
    shifts_context: bool = True  # llama.cpp shifts a full context, and as we do
    fills_width: bool = (
        False  # this version of llama.cpp takes no heads that are wider together than the model
    )
    groups_heads: bool = True  # llama.cpp takes fewer key/value heads than heads
    exact_shift: bool = True  # rotated keys turn back as if they had been computed at another position
    initial: Callable[[Any, str, tuple[int, ...], np.random.Generator], np.ndarray | None] = (
        lambda shape, name, axes, random: None
    )  # the value of a weight that is unlike others

    @property
    def arch(self) -> str:
        """The architecture's name."""
        return next(iter(self.shapes.values())).arch

    @property
    def prefix(self) -> str:
        """What the names of Hugging Face's modules begin with."""
        embeddings = self.end_rows(next(iter(self.shapes.values())))[0][1].removesuffix(".weight")
        return embeddings[: embeddings.rfind(".") + 1]

    def end_rows(self, shape: Shape) -> Sequence[Row]:
        """Return the rows outside the blocks."""
        return self.ends(shape) if callable(self.ends) else self.ends

    def block_rows(self, shape: Shape, layer: int) -> Sequence[Row]:
        """Return the rows of one block."""
        return self.block(shape, layer) if callable(self.block) else self.block


# ---- sizes that many families use ----------------------------------------------

GROUPED: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_size": 12, "embd": 48}
# heads wider together than the model
OWN: dict[str, Any] = {"heads": 4, "kv_heads": 1, "head_size": 10, "embd": 36, "ff": 64}
SINGLE: dict[str, Any] = {"heads": 3, "kv_heads": 3, "head_size": 6, "embd": 18, "ff": 40, "layers": 3}
# the same, of sizes that torch's products of experts take
EVEN: dict[str, Any] = SINGLE | {"head_size": 8, "embd": 24}
BROAD: dict[str, Any] = {"heads": 2, "kv_heads": 1, "head_size": 80, "embd": 96, "ff": 100}


def three(
    arch: str, first: dict[str, Any], second: dict[str, Any], third: dict[str, Any], kind: type[Shape] = Shape
) -> dict[str, Shape]:
    """Return the three shapes of a family."""
    return {name: kind(arch=arch, **each) for name, each in zip("abc", (first, second, third), strict=True)}


def key_and_value_length(shape: Shape) -> Numbers:
    """Return the keys of the size of heads."""
    return {"attention.key_length": shape.head_size, "attention.value_length": shape.head_size}


def expert_counts(shape: Any) -> Numbers:
    """Return the keys of how many experts there are."""
    return {"expert_count": shape.experts, "expert_used_count": shape.experts_used}


def expert_keys(shape: Any) -> Numbers:
    """Return the keys of mixtures of experts."""
    return expert_counts(shape) | {"expert_feed_forward_length": shape.expert_ff}


def expert_settings(shape: Any) -> dict[str, Any]:
    """Return the configuration of mixtures of experts."""
    return {
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_used,
        "moe_intermediate_size": shape.expert_ff,
    }


def rotary_keys(shape: Shape) -> Numbers:
    """Return the keys that converters write for llamas."""
    return {"vocab_size": shape.vocab, "rope.dimension_count": shape.turned or shape.head_size}
