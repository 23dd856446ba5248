"""Settings of contrastive training."""

from dataclasses import dataclass
from typing import Literal

from llamatrain.model.hyperparameters import Hyperparameters

Pooling = Literal["last", "mean", "cls"]  # of a text's tokens; cls takes the first one


@dataclass(frozen=True, kw_only=True)
class Contrastive:
    """The settings of contrastive training."""

    pooling: Pooling
    temperature: float
    sizes: tuple[
        int, ...
    ]  # of embeddings: the whole, and the first parts that are trained as well (Matryoshka)
    texts: int  # in a row: a query, its positive and its negatives
    rows: int  # of a step, over all micro-batches


def pooling_key(h: Hyperparameters) -> str:
    """Return the key of files for the pooling."""
    return f"{h.architecture.name}.pooling_type"


POOLING_TYPES: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}  # as files state them


def choose_pooling(asked: Pooling | Literal["auto"], stored: object, causal: bool) -> Pooling:
    """Return the pooling: what was asked for, else what the model's file states, else what suits its attention."""
    if asked != "auto":
        return asked
    default: Pooling = "last" if causal else "mean"
    return POOLING_TYPES.get(stored, default) if isinstance(stored, int) else default
