"""EXAONE 3 and 3.5, as the llama that they are in Hugging Face's library."""

from tests.helpers.architecture_family import ATTENTION, BEFORE, FORWARD, GROUPED, SINGLE, Family, three

FAMILY = Family(
    block=[*BEFORE, *ATTENTION, *FORWARD],
    shapes=three(
        "exaone",
        GROUPED | {"base": 1e6},
        {"heads": 4, "kv_heads": 1, "head_size": 10, "embd": 40, "tied": True, "base": 500.0},
        SINGLE | {"eps": 1e-6},
    ),
    config="LlamaConfig",
    model="LlamaForCausalLM",
    keys=lambda shape: {"rope.dimension_count": shape.head_size},
)
