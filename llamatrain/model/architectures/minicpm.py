"""MiniCPM (Hu et al. 2024): a Granite with other defaults of its multipliers.

Old files without a scale of the logits are refused: llama.cpp's default for them is the inverse of the right one.
"""

from dataclasses import replace

from llamatrain.model import layers
from llamatrain.model.architecture import Key, full_attention
from llamatrain.model.architectures import granite

KEYS = {
    "embedding_scale": Key("embedding_scale", float, 12.0),
    "residual_scale": Key("residual_scale", float, lambda known: 1.4 / max(1, known["layers"]) ** 0.5),
    "logit_scale": Key("logit_scale", float, min_value=1e-6),
}

ARCHITECTURE = replace(
    granite.ARCHITECTURE,
    name="minicpm",
    keys=layers.KEYS | KEYS,
    attention_mask=full_attention,
    new_model_values={"embedding_scale": 12.0, "residual_scale": 0.25, "logit_scale": 1.0},
    unsupported_names={"minicpm3": "a model with compressed keys and values"},
)
