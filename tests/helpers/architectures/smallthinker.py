"""SmallThinker. Its own code is not part of Hugging Face's library, whose parts make the models there."""

from dataclasses import dataclass
from typing import Any

from tests.helpers.architecture_family import (
    ATTENTION,
    BEFORE,
    EVEN,
    GROUPED,
    OWN,
    ROUTER,
    ExpertShape,
    Family,
    Numbers,
    expert_keys,
    expert_rows,
    expert_settings,
    three,
)
from tests.helpers.smallthinker_torch import add_small_thinker

WINDOW = 4096


@dataclass(frozen=True, kw_only=True)
class SmallThinkerShape(ExpertShape):
    """The sizes of a model with windows, or with none."""

    softmax: bool = False


def keys(shape: Any) -> Numbers:
    """Return the metadata."""
    window = {"attention.sliding_window": WINDOW} if shape.window else {}
    gating = {"expert_gating_func": 1 if shape.softmax else 2}
    return expert_keys(shape) | window | gating | {"feed_forward_length": shape.expert_ff}


def settings(shape: Any) -> dict[str, Any]:
    """Return the configuration, with the names of the model's own and of the library's classes."""
    every_fourth = [int(layer % 4 > 0) for layer in range(shape.layers)]
    rotated = every_fourth if shape.window else [1] * shape.layers
    own = {
        "moe_num_primary_experts": shape.experts,
        "moe_num_active_primary_experts": shape.experts_used,
        "moe_ffn_hidden_size": shape.expert_ff,
        "moe_primary_router_apply_softmax": shape.softmax,
        "moe_layer_layout": [1] * shape.layers,
        "rope_layout": rotated,
        "sliding_window_layout": every_fourth if shape.window else [0] * shape.layers,
        "sliding_window_size": WINDOW,
    }
    library = {
        "hidden_act": "relu",
        "no_rope_layers": rotated,
        "use_sliding_window": bool(shape.window),
        "sliding_window": WINDOW if shape.window else None,
        "layer_types": [
            "sliding_attention" if shape.window and layer % 4 else "full_attention"
            for layer in range(shape.layers)
        ],
    }
    return expert_settings(shape) | own | library


FAMILY = Family(
    block=[
        *BEFORE,
        *ATTENTION,
        *expert_rows("block_sparse_moe.primary_router", "block_sparse_moe.experts"),
    ],
    shapes=three(
        "smallthinker",
        GROUPED | {"layers": 5, "window": WINDOW, "base": 1.5e6, "eps": 1e-6, "experts_used": 3},
        OWN | {"layers": 5, "window": WINDOW, "tied": True, "expert_ff": 32, "experts": 5, "experts_used": 3},
        EVEN
        | {"base": 500.0, "eps": 1e-3, "expert_ff": 40, "experts": 9, "experts_used": 4, "softmax": True},
        SmallThinkerShape,
    ),
    config="SmolLM3Config",
    model="SmallThinkerForCausalLM",
    keys=keys,
    settings=settings,
    without_adapter=(ROUTER,),
    wide={"expert_ff": 256, "experts_used": 4},  # with 3, rounded products change which experts are chosen
    single_experts=("gate", "up", "down"),
    shifts_context=False,  # llama.cpp turns keys of blocks that never turn
    adjust=lambda shape: add_small_thinker(),
)
