"""Qwen 3 VL (Bai et al. 2025): the text model of a vision model, a Qwen 3.

Its rotation has sections for the axes of pictures. The position of text is the same on all axes. (llama.cpp leaves
out two slow pairs, which no section of its files covers; this changes next to nothing.) Blocks that add what the vision
model saw have nothing to add.
"""

from dataclasses import replace

from llamatrain.model.architecture import Key
from llamatrain.model.architectures import qwen3
from llamatrain.model.architectures.qwen2vl import SECTIONS, in_vision_model

ARCHITECTURE = replace(
    qwen3.ARCHITECTURE,
    name="qwen3vl",
    keys={**qwen3.ARCHITECTURE.keys, "n_deepstack_layers": Key("deepstack_layers", int, 0)},
    weights=in_vision_model(qwen3.WEIGHTS),
    lists=SECTIONS,
    unsupported_names={"qwen3vlmoe": "a vision-language mixture of experts"},
)
