"""Ling 2.0 in torch: Hugging Face's GLM 4.5, which computes the same, with the names and the joined matrix of Ling."""

from importlib import import_module
from typing import Any

NAME = "BailingMoeV2ForCausalLM"
# GLM's names of the parts of an attention, and Ling's
ATTENTION = {"o_proj": "dense", "q_norm": "query_layernorm", "k_norm": "key_layernorm"}
PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def renamed(name: str) -> property:
    """Return a property that gives an attribute of another name."""
    return property(lambda self: getattr(self, name))


def projection(number: int) -> property:
    """Return a property that gives one of the products of the joined matrix."""

    def multiply(self: Any) -> Any:
        return lambda x: self.query_key_value(x).split(self.sizes, -1)[number]

    return property(multiply)


def add_ling() -> None:
    """Add the model to transformers, where it is missing."""
    library, nn = import_module("transformers"), import_module("torch.nn")
    if NAME in vars(library):
        return
    glm = import_module("transformers.models.glm4_moe.modeling_glm4_moe")

    def join_projections(attention: Any) -> None:
        """Replace three matrices by one, and rename the other parts."""
        attention.sizes = [attention._modules.pop(name).out_features for name in PROJECTIONS]
        attention.query_key_value = nn.Linear(attention.config.hidden_size, sum(attention.sizes), bias=False)
        for old, new in ATTENTION.items():
            attention._modules[new] = attention._modules.pop(old)
        attention.__class__ = Attention

    def rename_parts(layer: Any) -> None:
        """Give a block and its router Ling's names."""
        join_projections(layer.self_attn)
        layer._modules["attention"] = layer._modules.pop("self_attn")
        layer.__class__ = Layer
        if hasattr(layer.mlp, "gate"):
            gate = layer.mlp.gate
            gate._buffers["expert_bias"] = gate._buffers.pop("e_score_correction_bias")
            gate.__class__ = Router

    class Attention(glm.Glm4MoeAttention):
        q_proj, k_proj, v_proj = map(projection, range(3))
        o_proj, q_norm, k_norm = map(renamed, ATTENTION.values())

    class Router(glm.Glm4MoeTopkRouter):
        e_score_correction_bias = renamed("expert_bias")

    class Layer(glm.Glm4MoeDecoderLayer):
        self_attn = renamed("attention")

    class Model(glm.Glm4MoeModel):
        embed_tokens = renamed("word_embeddings")

    class BailingMoeV2ForCausalLM(glm.Glm4MoeForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for layer in self.model.layers:
                rename_parts(layer)
            self.model._modules["word_embeddings"] = self.model._modules.pop("embed_tokens")
            self.model.__class__ = Model

    setattr(library, NAME, BailingMoeV2ForCausalLM)
