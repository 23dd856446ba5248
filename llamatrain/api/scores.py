"""Functions that apply a model to texts: losses, embeddings and ranks."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from llamatrain.api.calls import check_options, path_of, translate_errors
from llamatrain.commands.embed import EMBED_OPTIONS, embed_texts
from llamatrain.commands.evaluate import EVALUATE_OPTIONS, evaluate_model
from llamatrain.commands.evaluation import Evaluation
from llamatrain.commands.rerank import RERANK_OPTIONS, rank_texts
from llamatrain.config.messages import quote
from llamatrain.config.signatures import document_options
from llamatrain.errors import UsageError
from llamatrain.run.in_memory_rows import Data, Place, rows_for_call

if TYPE_CHECKING:
    from typing import Unpack

    import numpy as np

    from llamatrain.api.option_types import EmbedOptionsGiven, EvaluateOptionsGiven, RerankOptionsGiven


@document_options(*EVALUATE_OPTIONS)
def evaluate(
    model: Place, *data: Data, show: bool = False, **options: "Unpack[EvaluateOptionsGiven]"
) -> Evaluation:
    """Compute loss, perplexity and bits per byte of a model on data: paths, lists of them, or lists of rows.

    With objective="contrastive" or "rerank" the result is a Retrieval, which has recall, MRR and NDCG.
    """
    with translate_errors(show), rows_for_call(data) as files:
        return evaluate_model(path_of(model), files, check_options(options, *EVALUATE_OPTIONS))


@document_options(*EMBED_OPTIONS)
def embed(model: Place, texts: Sequence[str], **options: "Unpack[EmbedOptionsGiven]") -> "np.ndarray":
    """Return an embedding of length 1 for each text, as an array (texts, width)."""
    with translate_errors():
        return embed_texts(path_of(model), list_texts(texts), check_options(options, *EMBED_OPTIONS))


@document_options(*RERANK_OPTIONS)
def rerank(
    model: Place, query: str, texts: Sequence[str], **options: "Unpack[RerankOptionsGiven]"
) -> "np.ndarray":
    """Return the probability that each text answers a query, as an array (texts)."""
    with translate_errors():
        if not (isinstance(query, str) and query):
            raise UsageError(
                f"query must be a text that is not empty (got {quote(query)})", code="invalid-text"
            )
        values = check_options(options, *RERANK_OPTIONS)
        return rank_texts(path_of(model), query, list_texts(texts), values)


def list_texts(texts: Iterable[str]) -> list[str]:
    """Return texts as a list, or raise if they are anything else."""
    listed = [texts] if isinstance(texts, str) or not isinstance(texts, Iterable) else [*texts]
    if isinstance(texts, str) or not all(isinstance(text, str) and text for text in listed):
        raise UsageError("texts must be a list of texts that are not empty", code="invalid-text")
    return listed
