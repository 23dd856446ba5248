"""ERNIE 4.5 without experts (Baidu 2025): a llama whose heads rotate in pairs in Hugging Face's library, too."""

from dataclasses import replace

from llamatrain.model import layers
from llamatrain.model.architecture import Architecture

ATTENTION = {name: replace(kind, rotary_heads=None) for name, kind in layers.ATTENTION.items()}

ARCHITECTURE = Architecture(
    name="ernie4_5",
    keys=layers.KEYS,
    weights=layers.WEIGHTS | ATTENTION,
    rotation="pairs",
    embed=layers.embed,
    block=layers.block,
    final_norm=layers.final_norm,
    supported_values=layers.SUPPORTED_VALUES,
    unsupported_names={"paddleocr": "a vision-language model"},
)
