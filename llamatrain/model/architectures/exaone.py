"""EXAONE 3 and 3.5 (LG AI Research 2024): a llama whose heads rotate in halves."""

from llamatrain.model import layers
from llamatrain.model.architecture import Architecture

ARCHITECTURE = Architecture(
    name="exaone",
    keys=layers.KEYS,
    weights=layers.WEIGHTS,
    rotation="halves",
    embed=layers.embed,
    block=layers.block,
    final_norm=layers.final_norm,
    supported_values=layers.SUPPORTED_VALUES,
)
