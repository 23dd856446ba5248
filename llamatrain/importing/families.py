"""The models of transformers that can be imported, by the class that a configuration names.

A model's weights follow from the declaration of its architecture (`model/architectures`), which has the module of each
weight in transformers and the order of its rows. A family adds what differs in files: names of older classes, keys, and how
some numbers are stored.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import NormalDist

import numpy as np

from llamatrain.importing.config import Config, read_config
from llamatrain.importing.keys import (
    EXPERT_WIDTH,
    GATING,
    LLAMA,
    VOCABULARY,
    Keys,
    MakeKeys,
    copy,
    copy_numbers,
    join,
    sections,
    window,
    window_pattern,
)
from llamatrain.importing.llama3 import llama3_factors, long_factors
from llamatrain.model.hyperparameters import Hyperparameters

SOFTMAX, SIGMOID = GATING["softmax"], GATING["sigmoid"]
ATTENTION = ("attention", "full_attention")  # names of blocks with attention
Factors = Mapping[str, tuple[float | np.ndarray, ...]]


def nothing(config: Config) -> Keys:
    """Return no further keys."""
    return {}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A class of models, and what its files need beyond the declaration of its architecture."""

    architecture: str  # general.architecture
    keys: MakeKeys = nothing  # beside the common ones
    left_out: tuple[str, ...] = ()  # common keys that a file does not have
    norms_less_one: bool = False  # files of transformers have norms less 1
    # parts of names in a checkpoint, and what they are called in the declaration of the architecture
    renames: tuple[tuple[str, str], ...] = ()
    # ends of GGUF names of alternative weights that are not written: others are written instead
    unused: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()  # beginnings of names of a checkpoint that are no part of the model
    # tensors that a file has besides weights
    tensors: Callable[[Config], dict[str, np.ndarray]] = lambda config: {}
    # what the numbers of weights are multiplied with, one after the other, by the ends of GGUF names
    multipliers: Callable[[Config], Factors] = lambda config: {}
    # GGUF names of weights without block and end, and the tensor that has their rows, and the places of these rows
    joined: Mapping[str, str] = field(default_factory=dict)
    joined_rows: Callable[[Hyperparameters, str], np.ndarray] = lambda h, name: np.arange(0)
    # keys of lists of numbers that a checkpoint has as tensors, one for each block, by their names
    number_lists: Mapping[str, str] = field(default_factory=dict)
    pads_vocabulary: bool = False  # tables may have fewer rows than there are tokens
    cuts_vocabulary: bool = False  # embeddings may have more rows than there are tokens
    drops_tied_output: bool = (
        False  # a file has no output matrix where the configuration says that it is tied
    )
    transposes_experts: bool = False  # matrices of experts lie the other way
    permutes: bool = True  # False: the rows of heads have the order of the file


# ---- keys of families -------------------------------------------------------------


def granite(config: Config) -> Keys:
    """Return the multipliers of a Granite; a file leaves out those that are 0."""
    scales = copy_numbers(
        attention__scale="attention_multiplier",
        embedding_scale="embedding_multiplier",
        residual_scale="residual_multiplier",
        logit_scale="logits_scaling",
    )(config)
    found: Keys = {key: value for key, value in scales.items() if value}
    if config.head_size * config.heads != config.embd:
        found |= {"attention.key_length": config.head_size, "attention.value_length": config.head_size}
    return found


def cohere(config: Config) -> Keys:
    """Return the keys of a Command R."""
    lengths = copy(context_length="model_max_length")(config)
    return lengths | {"logit_scale": config.number("logit_scale"), "rope.scaling.type": "none"}


def cohere2(config: Config) -> Keys:
    """Return the keys of a Command R7B."""
    size = config.embd // config.heads
    rotated = int(config.number("rotary_pct", default=1.0) * size)
    return join(cohere, window, VOCABULARY)(config) | {"rope.dimension_count": rotated}


def deepseek(config: Config) -> Keys:
    """Return the keys of multi-head latent attention."""
    rank, rotated = config.count("kv_lora_rank"), config.count("qk_rope_head_dim")
    has_experts = config.has("n_routed_experts")
    dense = config.count("first_k_dense_replace", default=0 if has_experts else config.layers)
    found: Keys = {
        "attention.head_count_kv": 1,
        "leading_dense_block_count": dense,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": config.count("qk_nope_head_dim") + rotated,
        "attention.value_length_mla": config.count("v_head_dim"),
        "expert_shared_count": config.count("n_shared_experts", default=0),
        "rope.dimension_count": rotated,
    }
    found |= join(VOCABULARY, EXPERT_WIDTH, copy(attention__q_lora_rank="q_lora_rank"))(config)
    found |= copy_numbers(expert_weights_scale="routed_scaling_factor")(config)
    if config.flag("norm_topk_prob"):
        found["expert_weights_norm"] = True
    if config.rope.get("mscale_all_dim") is not None:
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * config.rope_number("mscale_all_dim")
    return found


def deepseek3(config: Config) -> Keys:
    """Return the same for DeepSeek V3, whose configuration need not say that scores are sigmoids."""
    return deepseek(config) | ({} if config.has("scoring_func") else {"expert_gating_func": SIGMOID})


def ernie_moe(config: Config) -> Keys:
    """Return the keys of ERNIE 4.5 with experts."""
    shared = config.count("moe_num_shared_experts", default=0)
    found = join(
        copy(
            expert_count="moe_num_experts",
            expert_used_count="moe_k",
            leading_dense_block_count="moe_layer_start_index",
            expert_shared_count="moe_num_shared_experts",
        ),
        EXPERT_WIDTH,
    )(config)
    if shared:
        found["expert_shared_feed_forward_length"] = shared * config.count("moe_intermediate_size")
    return found | {"interleave_moe_layer_step": config.count("moe_layer_interval", default=1)}


def optional_windows(config: Config) -> Keys:
    """Return windows, if there are any."""
    if not config.has("sliding_window"):
        return {}
    found = window(config)
    return found | window_pattern(config) if config.has("layer_types") else found


def scan(config: Config, heads: int, inner: int) -> Keys:
    """Return the keys of a scan of Mamba 2."""
    return {
        "ssm.conv_kernel": config.count("mamba_d_conv"),
        "ssm.state_size": config.count("mamba_d_state"),
        "ssm.group_count": config.count("mamba_n_groups"),
        "ssm.time_step_rank": heads,
        "ssm.inner_size": inner,
    }


def exaone(config: Config) -> Keys:
    """Return the keys of an EXAONE 3, whose configuration calls the epsilon of its norms that of layer norms."""
    return {
        "attention.layer_norm_rms_epsilon": config.number("rms_norm_eps", "layer_norm_epsilon"),
        "rope.dimension_count": int(config.share_rotated * config.head_size),
    }


def falcon_h1(config: Config) -> Keys:
    """Return the keys of a Falcon H1."""
    inner = config.count("mamba_d_ssm", default=config.count("mamba_expand", default=0) * config.embd)
    heads = inner // max(1, config.count("mamba_d_head"))
    return VOCABULARY(config) | scan(config, heads, inner)


def falcon_h1_multipliers(config: Config) -> Factors:
    """Return what the weights of a Falcon H1 are multiplied with."""
    gate, down = config.numbers("mlp_multipliers") if config.has("mlp_multipliers") else (1.0, 1.0)
    attention_in = config.number("attention_in_multiplier", default=1.0)
    factors: dict[str, tuple[float | np.ndarray, ...]] = {
        "ffn_gate.weight": (gate,),
        "ffn_down.weight": (down,),
        "attn_q.weight": (attention_in,),
        "attn_k.weight": (config.number("key_multiplier", default=1.0), attention_in),
        "attn_v.weight": (attention_in,),
        "attn_output.weight": (config.number("attention_out_multiplier", default=1.0),),
        "ssm_in.weight": (config.number("ssm_in_multiplier", default=1.0), scan_multipliers(config)),
        "ssm_out.weight": (config.number("ssm_out_multiplier", default=1.0),),
        "token_embd.weight": (config.number("embedding_multiplier", default=1.0),),
        "output.weight": (config.number("lm_head_multiplier", default=1.0),),
    }
    return {name: each for name, each in factors.items() if any(np.any(factor != 1) for factor in each)}


def scan_multipliers(config: Config) -> np.ndarray:
    """Return the factor of each row of the input of a scan: gates, values, keys, queries and steps."""
    numbers = config.numbers("ssm_multipliers") if config.has("ssm_multipliers") else [1.0] * 5
    inner, state = config.count("mamba_d_ssm"), config.count("mamba_n_groups") * config.count("mamba_d_state")
    if len(numbers) != 5:
        raise config.error("ssm_multipliers", "five numbers", numbers)
    return np.repeat(numbers, [inner, inner, state, state, config.count("mamba_n_heads")])[:, None]


def granite_hybrid(config: Config) -> Keys:
    """Return the keys of a Granite 4 with scans."""
    kinds = config.layer_types(config.layers)
    heads, size = config.count("mamba_n_heads"), config.count("mamba_d_head")
    found: Keys = {
        "attention.head_count_kv": [config.kv_heads if kind in ATTENTION else 0 for kind in kinds],
        "rope.scaling.finetuned": config.values.get("position_embedding_type") == "rope",
        "feed_forward_length": config.count("shared_intermediate_size"),
    }
    if not found["rope.scaling.finetuned"]:
        found["context_length"] = 1 << 20
    return granite_moe(config) | found | scan(config, heads, heads * size)


def granite_moe(config: Config) -> Keys:
    """Return the keys of a Granite with experts."""
    found = join(LLAMA, granite, copy(expert_shared_feed_forward_length="shared_intermediate_size"))(config)
    return {key: value for key, value in found.items() if value}


def hunyuan(config: Config) -> Keys:
    """Return the keys of a rotation that is scaled by a number alpha."""
    if config.rope.get("rope_type") not in ("dynamic", "xdrope"):
        return {}
    size = config.head_size
    base = config.rope_number("rope_theta", 10000.0) * config.rope_number("alpha", 50.0) ** (
        size / (size - 2)
    )
    return {
        "rope.freq_base": config.check_number("alpha", base),
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1.0,
        "rope.scaling.original_context_length": 1 << 18,
        "context_length": 1 << 18,
    }


def same_in_all(config: Config, *names: str) -> int:
    """Return a number that a configuration may have for each block."""
    name = config.find(*names)
    value = config.values[name] if name else None
    if isinstance(value, list):
        found = {int(number) for number in config.numbers(str(name))}
        if len(found) != 1:
            raise config.error(str(name), "the same number in all blocks", value)
        return found.pop()
    return config.count(*names)


def hunyuan_moe(config: Config) -> Keys:
    """Return the keys of a Hunyuan with experts."""
    return hunyuan(config) | {
        "expert_shared_feed_forward_length": config.count("intermediate_size"),
        "expert_feed_forward_length": same_in_all(config, "moe_intermediate_size", "intermediate_size"),
        "expert_used_count": same_in_all(config, "moe_topk", "num_experts_per_tok"),
        "expert_shared_count": same_in_all(config, "num_shared_expert")
        if config.has("num_shared_expert")
        else 1,
    }


def lfm2(config: Config) -> Keys:
    """Return the keys of a model with short convolutions."""
    kinds = config.layer_types(config.layers)
    width = config.count("block_ff_dim", "intermediate_size")
    if config.flag("block_auto_adjust_ff_dim", default=True) and not config.has("num_experts"):
        width = int(config.number("block_ffn_dim_multiplier", default=1.0) * int(2 * width / 3))
        multiple = max(1, config.count("block_multiple_of", default=256))
        width = -(-width // multiple) * multiple
    return join(VOCABULARY, copy(shortconv__l_cache="conv_L_cache"))(config) | {
        "attention.head_count_kv": [config.kv_heads if kind == "full_attention" else 0 for kind in kinds],
        "attention.layer_norm_rms_epsilon": config.number("norm_eps", default=1e-5),
        "feed_forward_length": width,
    }


def lfm2_moe(config: Config) -> Keys:
    """Return the same with experts."""
    dense = copy(leading_dense_block_count="num_dense_layers")
    gating: Keys = {"expert_gating_func": SIGMOID, "feed_forward_length": config.count("intermediate_size")}
    return lfm2(config) | join(EXPERT_WIDTH, dense)(config) | gating


def minicpm(config: Config) -> Keys:
    """Return the scales of a MiniCPM."""
    return {
        "embedding_scale": config.number("scale_emb"),
        "residual_scale": config.number("scale_depth") / config.layers**0.5,
        "logit_scale": config.embd / config.number("dim_model_base"),
    }


def mistral3(config: Config) -> Keys:
    """Return the keys of a Ministral 3."""
    found = LLAMA(config)
    if config.rope.get("rope_type") == "yarn":
        found["rope.scaling.yarn_log_multiplier"] = config.rope_number("mscale_all_dim")
        found["attention.temperature_scale"] = config.rope_number("llama_4_scaling_beta")
    return found


def nemotron(config: Config) -> Keys:
    """Return the keys of a Nemotron."""
    found: Keys = {
        "attention.layer_norm_epsilon": config.number("layer_norm_eps", "norm_epsilon", "norm_eps"),
        "rope.dimension_count": int(config.share_rotated * config.embd) // config.heads,
        "rope.scaling.type": "none",
    }
    if config.rope.get("factor") is not None:
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": config.rope_number("factor")}
    return VOCABULARY(config) | found


def olmo(config: Config) -> Keys:
    """Return the keys of an OLMo."""
    return copy_numbers(attention__clamp_kqv="clip_qkv")(config) | {"attention.layer_norm_epsilon": 1e-5}


def phi2(config: Config) -> Keys:
    """Return the keys of a Phi 2."""
    return {
        "feed_forward_length": 4 * config.embd,
        "attention.head_count_kv": config.heads,
        "rope.dimension_count": int(config.share_rotated * config.embd) // config.heads,
    }


def phi3(config: Config) -> Keys:
    """Return the keys of a Phi 3."""
    length = int(
        config.rope_number("original_max_position_embeddings", config.count("max_position_embeddings"))
    )
    found: Keys = {
        "rope.scaling.original_context_length": length,
        "rope.dimension_count": int(config.share_rotated * config.embd) // config.heads,
        "attention.sliding_window": config.count("sliding_window", default=0),
    }
    if config.rope.get("long_factor"):
        scale = config.count("max_position_embeddings") / length if length > 1 else 1.0
        factor = math.sqrt(1 + math.log(scale) / math.log(length)) if scale > 1 else 1.0
        found["rope.scaling.attn_factor"] = factor
    return found


def stablelm(config: Config) -> Keys:
    """Return the keys of a StableLM."""
    return {
        "attention.layer_norm_epsilon": config.number("layer_norm_eps", "norm_eps"),
        "rope.dimension_count": int(config.share_rotated * (config.embd // config.heads)),
        "use_parallel_residual": config.flag("use_parallel_residual", default=True),
    }


def delta_net(config: Config) -> Keys:
    """Return the keys of gated delta nets, and of experts if there are some."""
    values = config.count("linear_num_value_heads")
    found: Keys = {
        "ssm.conv_kernel": config.count("linear_conv_kernel_dim"),
        "ssm.state_size": config.count("linear_key_head_dim"),
        "ssm.group_count": config.count("linear_num_key_heads"),
        "ssm.time_step_rank": values,
        "ssm.inner_size": config.count("linear_value_head_dim") * values,
        "rope.dimension_count": int(config.head_size * config.rope_number("partial_rotary_factor", 0.25)),
    }
    interval = 4
    if config.has("layer_types"):
        recurrent = [kind == "linear_attention" for kind in config.layer_types(config.layers)]
        found["attention.recurrent_layers"] = recurrent
        interval = recurrent.index(False) + 1 if False in recurrent else interval
    found["full_attention_interval"] = config.count("full_attention_interval", default=interval)
    return found | QWEN_EXPERTS(config)


def qwen35(config: Config) -> Keys:
    """Return the keys of a Qwen 3.5."""
    default = [11, 11, 10, 0]
    has_sections = config.rope.get("mrope_section") is not None
    return delta_net(config) | {"rope.dimension_sections": sections(config) if has_sections else default}


QWEN_EXPERTS = join(EXPERT_WIDTH, copy(expert_shared_feed_forward_length="shared_expert_intermediate_size"))


def qwen3vl(config: Config) -> Keys:
    """Return the number of blocks that get what the vision model has seen."""
    vision = config.values.get("vision_config")
    indexes = vision.get("deepstack_visual_indexes") if isinstance(vision, dict) else None
    return {"n_deepstack_layers": len(indexes) if isinstance(indexes, list) else 0}


def gemma(config: Config) -> Keys:
    """Return the sizes of a Gemma."""
    size = config.count("head_dim", default=256)
    return {
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": size,
        "attention.value_length": size,
    }


def gemma2(config: Config) -> Keys:
    """Return the keys of a Gemma 2."""
    caps = copy_numbers(
        attn_logit_softcapping="attn_logit_softcapping", final_logit_softcapping="final_logit_softcapping"
    )
    return join(gemma, caps, window)(config)


def gemma3(config: Config) -> Keys:
    """Return the keys of a Gemma 3. Configurations of the first models leave out what equals the defaults."""
    size = config.count("head_dim", default=256)
    found: Keys = {
        "context_length": config.count("max_position_embeddings", default=131072),
        "attention.head_count": config.count("num_attention_heads", default=8),
        "attention.head_count_kv": config.count("num_key_value_heads", default=4),
        "attention.layer_norm_rms_epsilon": config.number("rms_norm_eps", default=1e-6),
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.freq_base": config.rope_number("rope_theta", 1e6),
    }
    if config.values.get("final_logit_softcapping"):
        found["final_logit_softcapping"] = config.number("final_logit_softcapping")
    if config.values.get("sliding_window_pattern") != 1:
        found |= window(config)
    return found


def pooling(config: Config) -> Keys:
    """Return how the outputs of tokens become one embedding, if a folder of Sentence Transformers says so."""
    path = config.path.parent / "1_Pooling" / "config.json"
    if not path.is_file():
        return {}
    modes = {"pooling_mode_mean_tokens": 1, "pooling_mode_cls_token": 2, "pooling_mode_lasttoken": 3}
    chosen = read_config(path)
    return next(({"pooling_type": number} for name, number in modes.items() if chosen.flag(name)), {})


def gemma3n(config: Config) -> Keys:
    """Return the keys of a Gemma 3n."""
    shares = config.numbers("activation_sparsity_pattern")
    return (
        gemma3(config)
        | window_pattern(config)
        | {
            "altup.active_idx": config.count("altup_active_idx"),
            "altup.num_inputs": config.count("altup_num_inputs"),
            "embedding_length_per_layer_input": config.count("hidden_size_per_layer_input"),
            "attention.shared_kv_layers": config.count("num_kv_shared_layers"),
            "activation_sparsity_scale": [normal_quantile(config, share) for share in shares],
        }
    )


def normal_quantile(config: Config, share: float) -> float:
    """Return the number that a share of normally distributed numbers are below, with float32 between the steps."""
    if not 0 <= share < 1:
        raise config.error("activation_sparsity_pattern", "numbers from 0 to below 1", share)
    centered = float(np.float32(2) * np.float32(share) - np.float32(1))
    if centered <= -1:
        return -math.inf
    inverse_error = NormalDist().inv_cdf((1 + centered) / 2) / math.sqrt(2)
    return float(np.float32(inverse_error) * np.float32(math.sqrt(2)))


def gemma4(config: Config) -> Keys:
    """Return the keys of a Gemma 4."""
    layers, shared = config.layers, config.count("num_kv_shared_layers", default=0)
    windowed = [kind == "sliding_attention" for kind in config.layer_types(layers)]
    whole, local = whole_blocks(config, "global_head_dim", "head_dim"), config.count("head_dim")
    share = config.window_rope.get("partial_rotary_factor", 1.0)
    found: Keys = {
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config.count("hidden_size_per_layer_input", default=0),
        "attention.sliding_window_pattern": windowed,
        "attention.key_length": whole,
        "attention.value_length": whole,
        "attention.key_length_swa": local,
        "attention.value_length_swa": local,
        "rope.dimension_count": whole,
        "rope.dimension_count_swa": int(local * config.check_number("partial_rotary_factor", share)),
    }
    found |= copy(expert_feed_forward_length="moe_intermediate_size")(config)
    if config.flag("use_double_wide_mlp"):
        width = config.count("intermediate_size")
        found["feed_forward_length"] = [width if n < layers - shared else 2 * width for n in range(layers)]
    heads = config.kv_heads
    whole_heads = whole_blocks(config, "num_global_key_value_heads", "num_key_value_heads", heads)
    if whole_heads != heads:
        found["attention.head_count_kv"] = [heads if has_window else whole_heads for has_window in windowed]
    return gemma3(config) | found


def whole_blocks(config: Config, name: str, block_name: str, default: int | None = None) -> int:
    """Return a number of blocks without a window, which newer configurations have in a list of blocks."""
    if config.has(name):
        return config.count(name)
    blocks, kinds = config.values.get("per_layer_config"), config.layer_types(config.layers)
    for layer, block in blocks.items() if isinstance(blocks, dict) else ():
        is_whole = (
            str(layer).isdecimal() and int(layer) < len(kinds) and kinds[int(layer)] == "full_attention"
        )
        if is_whole and isinstance(block, dict) and block_name in block:
            return Config(config.path, block).count(block_name)
    return config.count(name, default=default)


def gemma4_factors(config: Config) -> dict[str, np.ndarray]:
    """Return factors that stop the rotation of a part of the heads of blocks without a window."""
    size = whole_blocks(config, "global_head_dim", "head_dim")
    share = config.rope_number("partial_rotary_factor", 0.25)
    rotated = int(size * share / 2)
    factors = np.where(np.arange(size // 2) < rotated, 1.0, 1e30)
    return {"rope_freqs.weight": factors.astype(np.float32)}


def glm4moe(config: Config) -> Keys:
    """Return the keys of a GLM 4.5."""
    share = config.rope_number("partial_rotary_factor", 0.5)
    found: Keys = {
        "rope.dimension_count": int(config.head_size * share),
        "expert_gating_func": SIGMOID,
    }
    found |= copy(
        expert_count="n_routed_experts",
        expert_feed_forward_length="moe_intermediate_size",
        expert_shared_count="n_shared_experts",
        leading_dense_block_count="first_k_dense_replace",
    )(config)
    found |= copy_numbers(expert_weights_scale="routed_scaling_factor")(config)
    if config.has("norm_topk_prob"):
        found["expert_weights_norm"] = config.flag("norm_topk_prob")
    return found


def bailing_moe2(config: Config) -> Keys:
    """Return the keys of a Ling 2.0: those of a GLM 4.5, and the width of each expert that all tokens use."""
    found = glm4moe(config) | VOCABULARY(config) | copy(expert_shared_count="num_shared_experts")(config)
    if config.has("score_function"):
        del found["expert_gating_func"]  # the configuration says it
    width = config.count("moe_shared_expert_intermediate_size", "moe_intermediate_size")
    return found | {"expert_shared_feed_forward_length": width}


def small_thinker(config: Config) -> Keys:
    """Return the keys of a SmallThinker."""
    width = config.count("moe_ffn_hidden_size")
    found: Keys = {
        "feed_forward_length": width,
        "expert_feed_forward_length": width,
        "expert_gating_func": SOFTMAX if config.flag("moe_primary_router_apply_softmax") else SIGMOID,
    }
    counts = copy(expert_count="moe_num_primary_experts", expert_used_count="moe_num_active_primary_experts")
    return found | counts(config) | small_thinker_window(config)


def small_thinker_window(config: Config) -> Keys:
    """Return the size of windows, if there are any. llama.cpp knows one size, and two layouts of blocks."""
    layers = range(config.layers)
    has_windows = config.has("sliding_window_layout") and any(config.numbers("sliding_window_layout"))
    every_fourth = [float(layer % 4 > 0) for layer in layers]
    layouts = {
        "sliding_window_layout": every_fourth if has_windows else [0.0 for _ in layers],
        "rope_layout": every_fourth if has_windows else [1.0 for _ in layers],
        "moe_layer_layout": [1.0 for _ in layers],
    }
    for name, expected in layouts.items():
        if config.has(name) and (numbers := config.numbers(name)) != expected:
            raise config.error(name, "the layout of a published SmallThinker", numbers)
    if not has_windows:
        return {}
    if (size := config.count("sliding_window_size")) != 4096:
        raise config.error("sliding_window_size", "4096, which llama.cpp takes for any other", size)
    return {"attention.sliding_window": size}


def glm4(config: Config) -> Keys:
    """Return the keys of a GLM 4."""
    share = config.rope_number("partial_rotary_factor", 0.5)
    return {"rope.dimension_count": int(config.head_size * share)}


def gpt_oss(config: Config) -> Keys:
    """Return the keys of gpt-oss."""
    return window(config) | {"expert_feed_forward_length": config.count("intermediate_size")}


# ---- rows of joined weights -----------------------------------------------------------


def latent_rows(h: Hyperparameters, name: str) -> np.ndarray:
    """Return the rows of the matrices of heads that make keys, or values, from latents."""
    still, value = int(h.extra["key_length"]) - h.rope.size, int(h.extra["value_length"])
    rows = np.arange(h.heads * (still + value)).reshape(h.heads, -1)
    return (rows[:, :still] if name == "attn_k_b" else rows[:, still:]).ravel()


def grouped_rows(h: Hyperparameters, name: str) -> np.ndarray:
    """Return the rows of queries, keys or values where each group of heads has all three one behind the other."""
    groups, queries = h.kv_heads, h.heads // h.kv_heads
    rows = np.arange(groups * (queries + 2) * h.head_size).reshape(groups, queries + 2, h.head_size)
    chosen = {"attn_q": slice(queries), "attn_k": slice(-2, -1), "attn_v": slice(-1, None)}[name]
    return rows[:, chosen].ravel()


# ---- families -----------------------------------------------------------------------

MIXTRAL = ((".block_sparse_moe.", ".mlp."),)
GRANITE_EXPERTS = (
    (".block_sparse_moe.input_linear.weight", ".block_sparse_moe.experts.gate_up_proj"),
    (".block_sparse_moe.output_linear.weight", ".block_sparse_moe.experts.down_proj"),
    (".block_sparse_moe.router.layer.weight", ".block_sparse_moe.router.weight"),
)
JOINED_STACK = ("ffn_gate_up_exps.weight",)
EXAONE = (
    ("transformer.wte.", "embed_tokens."),
    ("transformer.ln_f.", "norm."),
    ("transformer.h.", "layers."),
    (".ln_1.", ".input_layernorm."),
    (".ln_2.", ".post_attention_layernorm."),
    (".attn.attention.", ".self_attn."),
    (".out_proj.", ".o_proj."),
    (".mlp.c_fc_0.", ".mlp.gate_proj."),
    (".mlp.c_fc_1.", ".mlp.up_proj."),
    (".mlp.c_proj.", ".mlp.down_proj."),
)
INTERNLM2 = (
    ("tok_embeddings.", "embed_tokens."),
    (".attention_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
    (".attention.wo.", ".self_attn.o_proj."),
    (".attention.wqkv.", ".self_attn.qkv_proj."),
    (".feed_forward.w1.", ".mlp.gate_proj."),
    (".feed_forward.w3.", ".mlp.up_proj."),
    (".feed_forward.w2.", ".mlp.down_proj."),
)


HEAD_SIZES = ("attention.key_length", "attention.value_length")
PLAIN_SIZES = (*HEAD_SIZES, "attention.layer_norm_rms_epsilon")  # that converters of layer norms do not write


def llama_like(architecture: str, keys: MakeKeys = LLAMA, **more: object) -> Family:
    """Return a family whose rotation may be scaled as that of Llama 3."""
    return Family(architecture=architecture, keys=keys, tensors=llama3_factors, **more)  # type: ignore[arg-type]


LLAMA_FAMILY = llama_like("llama")
QWEN2 = Family(architecture="qwen2")
QWEN35 = Family(architecture="qwen35", keys=qwen35, norms_less_one=True, ignored=("mtp.",))
GEMMA3 = Family(architecture="gemma3", keys=gemma3, norms_less_one=True, cuts_vocabulary=True)
GEMMA3N = Family(architecture="gemma3n", keys=gemma3n, pads_vocabulary=True)
GEMMA4 = Family(
    architecture="gemma4",
    keys=gemma4,
    tensors=gemma4_factors,
    unused=("ffn_gate_exps.weight", "ffn_up_exps.weight"),
)
DEEPSEEK = Family(
    architecture="deepseek2",
    keys=deepseek,
    unused=("attn_kv_b.weight",),
    joined={f"attn_{x}_b": "layers.{}.self_attn.kv_b_proj.weight" for x in "kv"},
    joined_rows=latent_rows,
    left_out=HEAD_SIZES,
    drops_tied_output=True,
)
GRANITE_MOE = llama_like(
    "granitemoe",
    granite_moe,
    renames=GRANITE_EXPERTS,
    left_out=HEAD_SIZES,
)
FAMILIES: dict[str, Family] = {
    "ApertusForCausalLM": llama_like(
        "apertus",
        number_lists={
            f"xielu.{name}": f"layers.{{}}.mlp.act_fn.{name}"
            for name in ("alpha_n", "alpha_p", "beta", "eps")
        },
    ),
    "ArceeForCausalLM": llama_like("arcee"),
    "BailingMoeV2ForCausalLM": Family(architecture="bailingmoe2", keys=bailing_moe2),
    "CohereForCausalLM": Family(architecture="command-r", keys=cohere),
    "Cohere2ForCausalLM": Family(architecture="cohere2", keys=cohere2),
    "DeepseekV2ForCausalLM": DEEPSEEK,
    "DeepseekV3ForCausalLM": replace(DEEPSEEK, keys=deepseek3),
    "Ernie4_5ForCausalLM": Family(architecture="ernie4_5", renames=(("ernie.", "model."),)),
    "Ernie4_5_ForCausalLM": Family(architecture="ernie4_5", renames=(("ernie.", "model."),)),
    "Ernie4_5_MoeForCausalLM": Family(
        architecture="ernie4_5-moe",
        keys=ernie_moe,
        renames=(("ernie.", "model."), (".mlp.moe_statics.", ".mlp.gate.moe_statics.")),
        ignored=("model.mtp_", "mtp_"),
    ),
    "ExaoneForCausalLM": llama_like("exaone", exaone, renames=EXAONE),
    "Exaone4ForCausalLM": llama_like("exaone4", join(VOCABULARY, optional_windows)),
    "FalconH1ForCausalLM": Family(
        architecture="falcon-h1", keys=falcon_h1, multipliers=falcon_h1_multipliers
    ),
    "GemmaForCausalLM": Family(
        architecture="gemma", keys=gemma, norms_less_one=True, left_out=("rope.freq_base",)
    ),
    "Gemma2ForCausalLM": Family(
        architecture="gemma2", keys=gemma2, norms_less_one=True, left_out=("rope.freq_base",)
    ),
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": GEMMA3,
    "Gemma3TextModel": Family(
        architecture="gemma-embedding",
        keys=join(gemma3, pooling),
        norms_less_one=True,
    ),
    "Gemma3nForCausalLM": GEMMA3N,
    "Gemma3nForConditionalGeneration": GEMMA3N,
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4ForConditionalGeneration": GEMMA4,
    "Glm4ForCausalLM": Family(architecture="glm4", keys=glm4),
    "Glm4MoeForCausalLM": Family(architecture="glm4moe", keys=glm4moe),
    "GptOssForCausalLM": Family(architecture="gpt-oss", keys=gpt_oss, transposes_experts=True),
    "GraniteForCausalLM": llama_like("granite", join(LLAMA, granite), left_out=HEAD_SIZES),
    "GraniteMoeForCausalLM": GRANITE_MOE,
    "GraniteMoeSharedForCausalLM": GRANITE_MOE,
    "GraniteMoeHybridForCausalLM": Family(
        architecture="granitehybrid",
        keys=granite_hybrid,
        left_out=HEAD_SIZES,
    ),
    "HunYuanDenseV1ForCausalLM": Family(architecture="hunyuan-dense", keys=hunyuan, drops_tied_output=True),
    "HunYuanMoEV1ForCausalLM": Family(architecture="hunyuan-moe", keys=hunyuan_moe, drops_tied_output=True),
    "InternLM2ForCausalLM": Family(
        architecture="internlm2",
        renames=INTERNLM2,
        joined={f"attn_{x}": "layers.{}.self_attn.qkv_proj.weight" for x in "qkv"},
        joined_rows=grouped_rows,
    ),
    "Lfm2ForCausalLM": Family(architecture="lfm2", keys=lfm2),
    "Lfm2MoeForCausalLM": Family(architecture="lfm2moe", keys=lfm2_moe),
    "LlamaForCausalLM": LLAMA_FAMILY,
    "LlavaForConditionalGeneration": LLAMA_FAMILY,
    "MiniCPMForCausalLM": Family(architecture="minicpm", keys=minicpm, tensors=long_factors),
    "Ministral3ForCausalLM": llama_like("mistral3", mistral3),
    "Mistral3ForConditionalGeneration": llama_like("mistral3", mistral3),
    "MistralForCausalLM": LLAMA_FAMILY,
    "MixtralForCausalLM": llama_like("llama", renames=MIXTRAL),
    "NemotronForCausalLM": Family(architecture="nemotron", keys=nemotron, norms_less_one=True),
    "OlmoForCausalLM": Family(architecture="olmo", keys=olmo),
    "Olmo2ForCausalLM": Family(architecture="olmo2", keys=optional_windows),
    "Olmo3ForCausalLM": Family(architecture="olmo2", keys=optional_windows),
    "OlmoeForCausalLM": Family(architecture="olmoe"),
    "PhiForCausalLM": Family(architecture="phi2", keys=phi2, left_out=(*PLAIN_SIZES, "rope.freq_base")),
    "Phi3ForCausalLM": Family(
        architecture="phi3",
        keys=phi3,
        tensors=long_factors,
        left_out=(*HEAD_SIZES, "rope.scaling.type"),
    ),
    "Qwen2ForCausalLM": QWEN2,
    "Qwen2Model": QWEN2,
    "Qwen2MoeForCausalLM": Family(architecture="qwen2moe", keys=QWEN_EXPERTS),
    "Qwen2VLForConditionalGeneration": Family(architecture="qwen2vl"),
    "Qwen2_5_VLForConditionalGeneration": Family(architecture="qwen2vl"),
    "Qwen3ForCausalLM": Family(architecture="qwen3"),
    "Qwen3Model": Family(architecture="qwen3"),
    "Qwen3MoeForCausalLM": Family(architecture="qwen3moe", keys=QWEN_EXPERTS),
    "Qwen3NextForCausalLM": Family(
        architecture="qwen3next",
        keys=delta_net,
        norms_less_one=True,
        unused=("ssm_in.weight", *JOINED_STACK),
        ignored=("mtp.",),
    ),
    "Qwen3VLForConditionalGeneration": Family(architecture="qwen3vl", keys=qwen3vl),
    "Qwen3_5ForCausalLM": QWEN35,
    "Qwen3_5ForConditionalGeneration": QWEN35,
    "Qwen3_5MoeForCausalLM": Family(
        architecture="qwen35moe", keys=qwen35, norms_less_one=True, unused=JOINED_STACK, ignored=("mtp.",)
    ),
    "Qwen3_5MoeForConditionalGeneration": Family(
        architecture="qwen35moe", keys=qwen35, norms_less_one=True, unused=JOINED_STACK, ignored=("mtp.",)
    ),
    "SeedOssForCausalLM": Family(architecture="seed_oss"),
    "SmallThinkerForCausalLM": Family(architecture="smallthinker", keys=small_thinker),
    "SmolLM3ForCausalLM": llama_like("smollm3"),
    "StableLmForCausalLM": Family(
        architecture="stablelm",
        keys=stablelm,
        left_out=(*PLAIN_SIZES, "rope.freq_base"),
        renames=(("_layernorm.norms.", "_layernorm."),),
    ),
    "Starcoder2ForCausalLM": Family(architecture="starcoder2"),
}
