"""The contrastive loss of a step: InfoNCE with in-batch negatives (van den Oord et al. 2018).

Each query is compared with the positives and negatives of all rows. Similarity is the cosine divided by the
temperature, and the loss of a query is the cross entropy of its own positive. If several sizes of embeddings are
trained, the loss is the sum over sizes (Matryoshka, Kusupati et al. 2022).
"""

from dataclasses import dataclass
from functools import reduce
from math import sqrt

import numpy as np

from llamatrain.contrastive.settings import Contrastive
from llamatrain.graph import ops as O
from llamatrain.graph.autodiff import value_and_gradients
from llamatrain.graph.ops import cont, cross_entropy_judged, cross_entropy_rows, rms_norm
from llamatrain.graph.tensor import F32, I32, DType, Tensor, placeholder

ABSENT = np.float32(
    -1e30
)  # added to the similarity of a text that does not exist; finite, as infinities are errors
SMALLEST_SQUARE = 1e-30  # added to squares that something is divided by


@dataclass(frozen=True)
class ComparisonGraph:
    """The comparison of all texts of a step."""

    inputs: dict[str, Tensor]
    loss: Tensor
    correct: Tensor  # the number of queries whose positive is the most similar text
    row_losses: Tensor  # (rows,)
    gradient: Tensor  # of the loss with respect to the embeddings


def build_comparison(settings: Contrastive, width: int, dtype: DType = F32) -> ComparisonGraph:
    """Build the graph of the loss and of its gradient with respect to the embeddings (rows, texts, width)."""
    rows, others = settings.rows, settings.texts - 1
    inputs = {
        "embeddings": placeholder("embeddings", (rows, settings.texts, width), dtype),
        "absent": placeholder("absent", (rows * others,), dtype),
        "own_texts": placeholder("own_texts", (rows,), I32),
        "row_weights": placeholder("row_weights", (rows,), dtype),
    }
    similarities = [
        O.add(compare(inputs["embeddings"], size, settings.temperature), inputs["absent"])
        for size in settings.sizes
    ]
    row_losses = reduce(O.add, (cross_entropy_rows(each, inputs["own_texts"]) for each in similarities))
    loss, gradients = value_and_gradients(
        O.sum(O.mul(row_losses, inputs["row_weights"])), [inputs["embeddings"]]
    )
    _, correct, _ = cross_entropy_judged(similarities[0], inputs["own_texts"], inputs["row_weights"])
    return ComparisonGraph(inputs, loss, correct, row_losses, gradients[0])


def compare(embeddings: Tensor, size: int, temperature: float) -> Tensor:
    """Return the similarities of the first text of each row to all others, by the first `size` numbers."""
    rows, texts, _ = embeddings.shape
    queries, others = (
        normalize(
            O.reshape(
                cont(O.view(embeddings, slices=((0, rows, 1), part, (0, size, 1)))),
                shape=(rows * (part[1] - part[0]), size),
            )
        )
        for part in ((0, 1, 1), (1, texts, 1))
    )
    return O.scale(O.matmul(queries, others), by=1 / temperature)


def normalize(x: Tensor) -> Tensor:
    """Return rows divided by their lengths."""
    ones = O.fill(shape=x.shape[-1:], value=1.0, dtype=x.dtype)
    return O.scale(rms_norm(x, ones, eps=SMALLEST_SQUARE), by=1 / sqrt(x.shape[-1]))


def comparison_inputs(embeddings: np.ndarray, present: np.ndarray) -> dict[str, np.ndarray]:
    """Return the arrays of the inputs: embeddings (rows, texts, width), and which of the texts exist."""
    rows, texts, _ = embeddings.shape
    queries = present[:, 0].astype(embeddings.dtype)
    return {
        "embeddings": embeddings,
        "absent": np.where(present[:, 1:], np.float32(0), ABSENT).reshape(-1),
        "own_texts": np.arange(rows, dtype=np.int32) * (texts - 1),
        "row_weights": queries / max(1, queries.sum()),
    }
