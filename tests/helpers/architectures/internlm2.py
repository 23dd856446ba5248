"""InternLM 2, as the llama into which it is often converted: its own code is not part of Hugging Face's library."""

from tests.helpers.architecture_family import ATTENTION, BEFORE, FORWARD, GROUPED, SINGLE, Family, three

FAMILY = Family(
    block=[*BEFORE, *ATTENTION, *FORWARD],
    shapes=three(
        "internlm2",
        GROUPED | {"base": 1e6, "eps": 1e-6},
        {"heads": 4, "kv_heads": 1, "head_size": 10, "embd": 40, "layers": 3},
        SINGLE,
    ),
    config="LlamaConfig",
    model="LlamaForCausalLM",
    pairs=True,
)
