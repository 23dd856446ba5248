"""EmbeddingGemma (Schechter Vera et al. 2025): Gemma 3 whose tokens also see later ones, within symmetric windows.

It predicts no text. What llama.cpp does with its last hidden states is not done here: it pools those of a text by
`pooling_type`, and multiplies with the matrices `dense_2` and `dense_3` if a file has them.
"""

from dataclasses import replace

from llamatrain.model import layers
from llamatrain.model.architecture import AttentionMask, Key
from llamatrain.model.architectures import gemma2, gemma3
from llamatrain.model.hyperparameters import Hyperparameters

MEAN = 1  # a text's embedding is the mean of its tokens'
KEYS = {key: each for key, each in gemma3.KEYS.items() if each.field != "logit_cap"} | {
    "pooling_type": Key("pooling", int, MEAN)
}


def attention_mask(h: Hyperparameters, layer: int) -> AttentionMask:
    """Return a block's mask."""
    window = int(h.extra["window"]) if gemma2.has_window(h, layer) else 0
    return AttentionMask(scale=h.head_size**-0.5, window=window)


ARCHITECTURE = replace(
    gemma3.ARCHITECTURE,
    name="gemma-embedding",
    keys=layers.KEYS | KEYS,
    # Hugging Face's model has nothing around the body
    weights={
        name: replace(kind, module=kind.module.removeprefix("model."))
        for name, kind in gemma3.ARCHITECTURE.weights.items()
    },
    causal=False,
    tied=True,
    attention_mask=attention_mask,
    logit_cap=lambda h: 0.0,
    supported_values=layers.SUPPORTED_VALUES
    | {"attention.causal": (False, "attention to earlier tokens alone")},
)
