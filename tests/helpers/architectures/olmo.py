"""OLMo 1."""

from tests.helpers.architecture_family import ATTENTION, ENDS, FORWARD, GROUPED, SINGLE, Family, three

FAMILY = Family(
    block=[*ATTENTION, *FORWARD],
    ends=[ENDS[0], ENDS[2]],
    shapes=three(
        "olmo",
        GROUPED | {"base": 500000.0},
        {"heads": 4, "kv_heads": 1, "head_size": 10, "embd": 40, "tied": True},
        SINGLE,
    ),
    config="OlmoConfig",
    model="OlmoForCausalLM",
    pairs=True,
    keys=lambda shape: {"attention.layer_norm_epsilon": shape.eps},
    dropped_keys=lambda shape: {"attention.layer_norm_rms_epsilon"},
    settings=lambda shape: {"clip_qkv": None},
)
