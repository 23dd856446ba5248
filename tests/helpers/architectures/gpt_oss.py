"""gpt-oss."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.helpers.architecture_family import (
    ATTENTION,
    BIASES,
    BROAD,
    GROUPED,
    OWN,
    ROUTER,
    ExpertShape,
    Family,
    expert_keys,
    key_and_value_length,
    three,
)


@dataclass(frozen=True, kw_only=True)
class LongShape(ExpertShape):
    """The sizes, and how long rows are scaled."""

    factor: float = 4.0


NORMS = [
    ("attn_norm.weight", "input_layernorm.weight", "embd"),
    ("post_attention_norm.weight", "post_attention_layernorm.weight", "embd"),
]
SINKS = [
    ("attn_output.bias", "self_attn.o_proj.bias", "embd"),
    ("attn_sinks.weight", "self_attn.sinks", "heads"),
]
EXPERTS = [
    ("ffn_gate_inp.weight", "mlp.router.weight", "experts embd"),
    ("ffn_gate_inp.bias", "mlp.router.bias", "experts"),
    ("ffn_gate_exps.weight", "mlp.experts.gate_up_proj#0", "experts expert_ff embd"),
    ("ffn_up_exps.weight", "mlp.experts.gate_up_proj#1", "experts expert_ff embd"),
    ("ffn_down_exps.weight", "mlp.experts.down_proj", "experts embd expert_ff"),
    ("ffn_gate_exps.bias", "mlp.experts.gate_up_proj_bias#0", "experts expert_ff"),
    ("ffn_up_exps.bias", "mlp.experts.gate_up_proj_bias#1", "experts expert_ff"),
    ("ffn_down_exps.bias", "mlp.experts.down_proj_bias", "experts embd"),
]


def output_order(shape: Any, theirs: str) -> np.ndarray | None:
    """Let each gate be followed by its up."""
    return np.arange(2 * shape.expert_ff).reshape(2, -1).T.ravel() if "gate_up_proj" in theirs else None


def whole_to_theirs(shape: Any, name: str, array: np.ndarray) -> np.ndarray:
    """Turn the experts, and let each gate be followed by its up."""
    if "gate_up_proj" in name:
        axis = -1 if name.endswith("bias") else -2
        gate, up = np.split(array, 2, axis)
        array = np.stack([gate, up], -1 if axis == -1 else -2).reshape(array.shape)
    turned = name.endswith(("gate_up_proj", "down_proj")) and "experts" in name
    return np.ascontiguousarray(np.swapaxes(array, -1, -2)) if turned else array


def whole_to_ours(shape: Any, name: str, array: np.ndarray) -> np.ndarray:
    """Turn gradients of experts back."""
    if name.endswith(("gate_up_proj", "down_proj")) and "experts" in name:
        array = np.swapaxes(array, -1, -2)
    if "gate_up_proj" in name:
        if name.endswith("bias"):
            return np.concatenate([array[..., ::2], array[..., 1::2]], -1)
        return np.concatenate([array[..., ::2, :], array[..., 1::2, :]], -2)
    return array


def keys(shape: Any) -> dict[str, Any]:
    """Return the metadata."""
    scaling = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": shape.factor,
        "rope.scaling.original_context_length": shape.original_ctx,
    }
    return (
        key_and_value_length(shape)
        | expert_keys(shape)
        | scaling
        | {"attention.sliding_window": shape.window}
    )


def settings(shape: Any) -> dict[str, Any]:
    """Return the configuration."""
    return {
        "num_local_experts": shape.experts,
        "num_experts_per_tok": shape.experts_used,
        "intermediate_size": shape.expert_ff,
        "sliding_window": shape.window,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": shape.base,
            "factor": shape.factor,
            "original_max_position_embeddings": shape.original_ctx,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    }


FAMILY = Family(
    block=[*NORMS, *ATTENTION, *BIASES, *SINKS, *EXPERTS],
    shapes=three(
        "gpt-oss",
        GROUPED | {"base": 150000.0, "window": 7, "experts_used": 3, "original_ctx": 16},
        OWN | {"experts": 5, "window": 20, "layers": 3, "original_ctx": 32, "factor": 2.0},
        BROAD
        | {
            "base": 500.0,
            "experts": 9,
            "experts_used": 4,
            "expert_ff": 40,
            "window": 5,
            "original_ctx": 8,
            "factor": 8.0,
        },
        LongShape,
    ),
    config="GptOssConfig",
    model="GptOssForCausalLM",
    keys=keys,
    settings=settings,
    without_adapter=(ROUTER,),
    wide={"expert_ff": 256},
    shifts_context=False,  # llama.cpp makes keys longer by YaRN's factor again
    whole_to_theirs=whole_to_theirs,
    whole_to_ours=whole_to_ours,
    output_order=output_order,
)
