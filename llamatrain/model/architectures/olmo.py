"""OLMo 1 (Groeneveld et al. 2024): a llama whose layer norms have no weights."""

from functools import partial

from llamatrain.graph import ops as O
from llamatrain.graph.ops import layer_norm
from llamatrain.graph.tensor import Tensor
from llamatrain.model import layers
from llamatrain.model.architecture import Architecture
from llamatrain.model.forward import ForwardPass


def norm(model: ForwardPass, x: Tensor, name: str) -> Tensor:
    """Return the layer norm of x without a weight."""
    ones = O.fill(shape=x.shape[-1:], value=1.0, dtype=x.dtype)
    return layer_norm(x, ones, eps=model.h.rms_eps, name=name)


ARCHITECTURE = Architecture(
    name="olmo",
    keys=layers.LAYER_NORM_KEYS,
    weights=layers.EMBEDDINGS
    | layers.ATTENTION
    | layers.FEED_FORWARD
    | {"output.weight": layers.FINAL["output.weight"]},
    rotation="pairs",
    embed=layers.embed,
    block=partial(layers.block, norm=norm),
    final_norm=partial(layers.final_norm, norm=norm),
    heads_fill_width=True,
    supported_values=layers.SUPPORTED_VALUES
    | {"attention.clamp_kqv": (0.0, "a limit of queries, keys and values")},
)
