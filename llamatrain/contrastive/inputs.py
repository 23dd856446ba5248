"""The arrays of the inputs of a graph of embeddings, by input name."""

import numpy as np

from llamatrain.data.batches import Batch, TextBatch


def texts_of(batch: Batch) -> TextBatch:
    """Return the texts of a batch."""
    assert batch.texts
    return batch.texts


def flat_places(places: np.ndarray, step: int) -> np.ndarray:
    """Return places in rows as places in the flattened batch, whose rows have `step` places."""
    return (places + np.arange(len(places), dtype=np.int32)[:, None] * step).reshape(-1)


def token_shares(batch: Batch) -> np.ndarray:
    """Return the weight of each token in the mean of its text."""
    texts = texts_of(batch)
    sizes = np.where(texts.present, texts.lasts - texts.firsts + 1, 1)
    shares = np.take_along_axis(1 / sizes, texts.numbers.astype(np.int64), axis=1)
    return np.where(batch.weights > 0, shares, 0).astype(np.float32).reshape(-1)


def embedding_gradients(batch: Batch) -> np.ndarray:
    """Return the gradient of the step's loss with respect to each embedding; 0 while it is unknown."""
    texts = texts_of(batch)
    if texts.gradients is None:
        return np.zeros((), np.float32)
    return texts.gradients.reshape(-1, texts.gradients.shape[-1])


TEXT_INPUTS = {
    "first_tokens": lambda batch: flat_places(texts_of(batch).firsts, batch.tokens.shape[1]),
    "last_tokens": lambda batch: flat_places(texts_of(batch).lasts, batch.tokens.shape[1]),
    "text_numbers": lambda batch: flat_places(texts_of(batch).numbers, texts_of(batch).firsts.shape[1]),
    "text_shares": token_shares,
    "embedding_gradients": embedding_gradients,
}
