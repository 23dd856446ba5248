"""Computes the hyperparameters of a GGUF file from a configuration: those that many architectures share."""

from collections.abc import Callable

from llamatrain.importing.config import Config

Number = int | float | bool | str
Keys = dict[str, Number | list[int] | list[float] | list[bool]]
MakeKeys = Callable[[Config], Keys]

# GGUF's key, its type, and the names that configurations have for it
COMMON: tuple[tuple[str, type, tuple[str, ...]], ...] = (
    (
        "context_length",
        int,
        ("max_position_embeddings", "n_ctx", "n_positions", "max_length", "model_max_length"),
    ),
    ("embedding_length", int, ("hidden_size", "n_embd", "dim")),
    ("feed_forward_length", int, ("intermediate_size", "n_inner", "hidden_dim")),
    ("attention.head_count", int, ("num_attention_heads", "n_head", "n_heads")),
    ("attention.head_count_kv", int, ("num_key_value_heads", "n_kv_heads")),
    ("attention.layer_norm_rms_epsilon", float, ("rms_norm_eps", "norm_eps")),
    ("attention.layer_norm_epsilon", float, ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")),
    ("expert_count", int, ("num_local_experts", "num_experts", "n_routed_experts")),
    ("expert_used_count", int, ("num_experts_per_tok", "num_experts_per_token", "top_k_experts")),
    ("expert_group_count", int, ("n_group",)),
    ("expert_group_used_count", int, ("topk_group",)),
    ("attention.key_length", int, ("head_dim",)),
    ("attention.value_length", int, ("head_dim",)),
)
GATING = {"softmax": 1, "sigmoid": 2}
LINEAR, YARN, LONG = "linear", "yarn", "longrope"
ROPE_TYPES = (
    None,
    "default",
    "mrope",
    LINEAR,
    YARN,
    LONG,
    "su",
    "llama3",
    "dynamic",
    "xdrope",
    "proportional",
)


def common_keys(config: Config) -> Keys:
    """Return what all architectures have in common."""
    found: Keys = {"block_count": config.layers}
    for key, kind, names in COMMON:
        if config.find(*names):
            found[key] = config.counts(*names) if kind is int else config.number(*names)
    if config.values.get("is_causal") is False:
        found["attention.causal"] = False
    if name := config.find("score_function", "scoring_func", "score_func"):
        function = config.values[name]
        if function not in GATING:
            raise config.error(name, " or ".join(GATING), function)
        found["expert_gating_func"] = GATING[function]
    return found | rope_keys(config)


def rope_keys(config: Config) -> Keys:
    """Return the keys of the rotation."""
    found, rope = Keys(), config.rope
    kind = rope.get("rope_type")
    if kind not in ROPE_TYPES:
        raise config.error("rope_type", f"one of {', '.join(ROPE_TYPES[1:])}", kind)
    if kind in (LINEAR, YARN) and rope.get("factor") is not None:
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": config.rope_number("factor")}
    if kind == YARN and "rope.scaling.type" in found:
        length = int(config.rope_number("original_max_position_embeddings"))
        found["rope.scaling.original_context_length"] = length
        names = {
            "yarn_ext_factor": "extrapolation_factor",
            "yarn_attn_factor": "attention_factor"
            if rope.get("attention_factor") is not None
            else "attn_factor",
            "yarn_beta_fast": "beta_fast",
            "yarn_beta_slow": "beta_slow",
        }
        for key, name in names.items():
            if rope.get(name) is not None:
                found[f"rope.scaling.{key}"] = config.rope_number(name)
    if kind in (LONG, "su"):
        found["rope.scaling.type"] = LONG
    if rope.get("mrope_section") is not None:
        found["rope.dimension_sections"] = sections(config)
    if rope.get("rope_theta") is not None:
        found["rope.freq_base"] = config.rope_number("rope_theta")
    if config.window_rope.get("rope_theta") is not None:
        theta = config.check_number("rope_theta", config.window_rope["rope_theta"])
        found["rope.freq_base_swa"] = theta
    return found


def sections(config: Config) -> list[int]:
    """Return how many pairs of a head rotate by time, height and width."""
    found = [int(number) for number in config.numbers("mrope_section", config.rope)]
    return [*found, 0, 0, 0, 0][:4]


# ---- what some architectures share --------------------------------------------


def join(*parts: MakeKeys) -> MakeKeys:
    """Return a function that joins the keys of others."""

    def joined(config: Config) -> Keys:
        found = Keys()
        for part in parts:
            found |= part(config)
        return found

    return joined


def copy(**names: str) -> MakeKeys:
    """Return a function that copies whole numbers that a configuration has; `__` stands for a dot."""
    return lambda config: {
        key.replace("__", "."): config.count(name) for key, name in names.items() if config.has(name)
    }


def copy_numbers(**names: str) -> MakeKeys:
    """Return the same for numbers that need not be whole."""
    return lambda config: {
        key.replace("__", "."): config.number(name) for key, name in names.items() if config.has(name)
    }


VOCABULARY = copy(vocab_size="vocab_size")


def whole_rotation(config: Config) -> Keys:
    """Return the size of heads as that of the part that rotates."""
    return {"rope.dimension_count": config.head_size}


def part_rotation(config: Config) -> Keys:
    """Return the size of the part of a head that rotates."""
    return {"rope.dimension_count": int(config.head_size * config.share_rotated)}


LLAMA = join(VOCABULARY, whole_rotation)


def window_pattern(config: Config) -> Keys:
    """Return which blocks have a window."""
    kinds = config.layer_types(config.layers)
    return {"attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds]}


def window(config: Config) -> Keys:
    """Return the size of windows."""
    return {"attention.sliding_window": config.count("sliding_window")}


EXPERT_WIDTH = copy(expert_feed_forward_length="moe_intermediate_size")
