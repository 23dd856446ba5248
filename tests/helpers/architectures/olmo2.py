"""OLMo 2 and 3."""

from tests.helpers.architecture_family import ATTENTION, BEHIND, FORWARD, GROUPED, SINGLE, Family, three

NORMS = [
    ("attn_q_norm.weight", "self_attn.q_norm.weight", "width"),
    ("attn_k_norm.weight", "self_attn.k_norm.weight", "kv_width"),
]
FAMILY = Family(
    block=[*BEHIND, *ATTENTION, *NORMS, *FORWARD],
    shapes=three(
        "olmo2",
        GROUPED | {"base": 500000.0, "eps": 1e-6},
        {"heads": 4, "kv_heads": 1, "head_size": 10, "embd": 40},
        SINGLE | {"eps": 1e-2},
    ),
    config="Olmo2Config",
    model="Olmo2ForCausalLM",
)
