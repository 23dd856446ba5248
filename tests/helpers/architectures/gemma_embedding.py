"""EmbeddingGemma: the body, without what a file may have behind it."""

from typing import Any

from tests.helpers.architecture_family import BROAD, GROUPED, OWN, Family, Shape, three
from tests.helpers.architectures import gemma3

WITHOUT_MODEL = [
    ("token_embd.weight", "embed_tokens.weight", "vocab embd"),
    ("output_norm.weight", "norm.weight", "embd"),
]


def keys(shape: Shape) -> dict[str, Any]:
    """Return the metadata."""
    return gemma3.keys(shape) | {
        "attention.causal": False,
        "pooling_type": 1,
    }


def settings(shape: Shape) -> dict[str, Any]:
    """Return the configuration, which also has the size of a whole window."""
    return gemma3.settings(shape) | {"use_bidirectional_attention": True}


FAMILY = Family(
    block=gemma3.FAMILY.block,
    ends=WITHOUT_MODEL,
    shapes=three(
        "gemma-embedding",
        GROUPED | {"window": 9, "base": 1e6, "layers": 7, "tied": True, "eps": 1e-6},
        OWN | {"window": 6, "base": 500.0, "layers": 6, "tied": True},
        BROAD | {"window": 16, "base": 1e6, "layers": 6, "tied": True},
    ),
    config="Gemma3TextConfig",
    model="Gemma3TextModel",
    norms_less_one=True,
    half_float_gelu=True,
    predicts_text=False,
    shifts_context=False,
    exact_shift=False,
    keys=keys,
    settings=settings,
)
