"""SmallThinker in torch: SmolLM 3's attention and Qwen 3's experts from Hugging Face, with a router ahead of both."""

from importlib import import_module
from typing import Any

NAME = "SmallThinkerForCausalLM"


def add_small_thinker() -> None:
    """Add the model to transformers, where it is missing."""
    library, torch = import_module("transformers"), import_module("torch")
    if NAME in vars(library):
        return
    smollm = import_module("transformers.models.smollm3.modeling_smollm3")
    qwen = import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")

    class Mixture(torch.nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.config = config
            self.primary_router = torch.nn.Linear(config.hidden_size, config.num_experts, bias=False)
            self.experts = qwen.Qwen3MoeExperts(config)

        def forward(self, x: Any, scored: Any) -> Any:
            """Return the sum of the experts with the largest scores; scores are shared among these alone."""
            scores, chosen = self.primary_router(scored).flatten(0, 1).topk(self.config.num_experts_per_tok)
            if self.config.moe_primary_router_apply_softmax:
                shares = scores.softmax(-1)
            else:
                shares = scores.sigmoid()
                shares = shares / shares.sum(-1, keepdim=True)
            return self.experts(x.flatten(0, 1), chosen, shares).view_as(x)

    class Layer(smollm.SmolLM3DecoderLayer):
        def __init__(self, config: Any, layer_idx: int) -> None:
            super().__init__(config, layer_idx)
            del self.mlp
            self.block_sparse_moe = Mixture(config)

        def forward(self, hidden_states: Any, **kwargs: Any) -> Any:
            attended, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
            x = hidden_states + attended
            return x + self.block_sparse_moe(self.post_attention_layernorm(x), hidden_states)

    class SmallThinkerForCausalLM(smollm.SmolLM3ForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            blocks = range(config.num_hidden_layers)
            self.model.layers = torch.nn.ModuleList([Layer(config, layer) for layer in blocks])

    setattr(library, NAME, SmallThinkerForCausalLM)
