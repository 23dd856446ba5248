"""InternLM 2 (Cai et al. 2024): a llama.

Its own code joins queries, keys and values in one matrix. Adapters of files have the names of the llama into which it is
often converted.
"""

from llamatrain.model import layers
from llamatrain.model.architecture import Architecture

ARCHITECTURE = Architecture(
    name="internlm2",
    keys=layers.KEYS,
    weights=layers.WEIGHTS,
    rotation="pairs",
    embed=layers.embed,
    block=layers.block,
    final_norm=layers.final_norm,
    tied=False,
    heads_fill_width=True,
    supported_values=layers.SUPPORTED_VALUES,
)
