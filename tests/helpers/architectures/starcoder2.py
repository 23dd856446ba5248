"""StarCoder 2."""

from tests.helpers.architecture_family import (
    ATTENTION,
    BEFORE,
    BIASES,
    GROUPED,
    SINGLE,
    Family,
    layer_norms,
    three,
)

BLOCK, ENDS = layer_norms(BEFORE)
FAMILY = Family(
    block=[
        *BLOCK,
        *ATTENTION,
        *BIASES,
        ("attn_output.bias", "self_attn.o_proj.bias", "embd"),
        ("ffn_up.weight", "mlp.c_fc.weight", "ff embd"),
        ("ffn_up.bias", "mlp.c_fc.bias", "ff"),
        ("ffn_down.weight", "mlp.c_proj.weight", "embd ff"),
        ("ffn_down.bias", "mlp.c_proj.bias", "embd"),
    ],
    ends=ENDS,
    shapes=three(
        "starcoder2",
        GROUPED | {"base": 1e6},
        {"heads": 4, "kv_heads": 1, "head_size": 10, "embd": 40, "tied": True, "eps": 1e-6},
        SINGLE | {"base": 500.0},
    ),
    config="Starcoder2Config",
    model="Starcoder2ForCausalLM",
    half_float_gelu=True,
    keys=lambda shape: {"attention.layer_norm_epsilon": shape.eps},
    dropped_keys=lambda shape: {"attention.layer_norm_rms_epsilon"},
    settings=lambda shape: {"norm_epsilon": shape.eps},
)
