"""The classifier of rerankers for llama-server: the rows of the output weight for yes and no, as a matrix of their own."""

from collections.abc import Sequence

import numpy as np

from llamatrain.errors import FileError
from llamatrain.gguf import quants
from llamatrain.gguf.reader import Gguf
from llamatrain.model.hyperparameters import Hyperparameters

HEAD = "cls.output.weight"
LEAST_COSINE = 0.9  # of a row of it with that of the output weight, as both may be quantized


def check_head(gguf: Gguf, h: Hyperparameters, verdicts: Sequence[int]) -> None:
    """Raise if a file has another classifier than the output weight's rows for the tokens of yes and no."""
    head = gguf.tensors.get(HEAD)
    if head is None:
        return
    output = gguf.tensors[h.output_weight]
    fits = head.shape == (2, output.shape[-1])
    if fits:
        rows, wanted = (
            quants.decode(np.array(raw), kind).astype(np.float64)
            for raw, kind in ((head.raw, head.type), (output.raw[[*verdicts]], output.type))
        )
        lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(wanted, axis=1)
        fits = bool(np.all((rows * wanted).sum(axis=1) >= LEAST_COSINE * lengths))
    if not fits:
        raise FileError(
            f"{gguf.path}: {HEAD} is another classifier than the output weight's rows for yes and no, which "
            "--objective rerank trains; use a reranker such as Qwen 3's",
            code="unsupported-model",
        )
