"""Evaluates embeddings on groups of a query, a text that answers it, and texts that do not."""

import math
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple, Self

from llamatrain.contrastive.retrieval import RetrievalScores, TextCollection

if TYPE_CHECKING:
    import numpy as np

    from llamatrain.contrastive.batches import GroupBatches
    from llamatrain.data.batches import Batch
    from llamatrain.train.programs import EvalPrograms


class MeasuredGroups(NamedTuple):
    """The scores of embeddings, and the loss as in training, with as many rows as a batch has."""

    scores: RetrievalScores
    loss: float
    tokens: int


def evaluate_retrieval(programs: "EvalPrograms", rows: "GroupBatches", batch: int) -> MeasuredGroups:
    """Embed all texts of the rows, and rank them for each query. Ranks of MPI share the batches."""
    from llamatrain.distributed.comm import get_comm
    from llamatrain.platform.terminal import progress_bar

    comm, own = get_comm(), list[EmbeddedBatch]()
    with progress_bar("embedding", total=len(rows.dataset), unit=" groups") as progress:
        for row_batch in rows.one_epoch(batch, comm.rank, comm.size):
            own.append(EmbeddedBatch.of(programs, row_batch))
            progress.update(row_batch.samples * comm.size)
    gathered = comm.all_gather(own)
    # the ranks took turns
    batches = [part for turn in zip_longest(*gathered) for part in turn if part is not None]
    collection = TextCollection()
    for part in batches:
        for keys, vectors in zip(part.keys, part.embeddings, strict=True):
            collection.add(keys, vectors[: len(keys)])
    groups = sum(len(part.keys) for part in batches)
    return MeasuredGroups(
        collection.scores(),
        math.fsum(part.loss for part in batches) / groups,
        sum(part.tokens for part in batches),
    )


class EmbeddedBatch(NamedTuple):
    """The embeddings of a batch of groups, and its loss."""

    keys: list[list[bytes]]  # of each group: the tokens of each text
    embeddings: "np.ndarray"  # (groups, texts, width)
    loss: float  # the sum over groups
    tokens: int

    @classmethod
    def of(cls, programs: "EvalPrograms", batch: "Batch") -> Self:
        """Embed the texts of a batch, and compare them with each other."""
        from llamatrain.contrastive.inputs import texts_of

        texts = texts_of(batch)
        embeddings = programs.embed(batch)
        groups = int(texts.present[:, 0].sum())
        loss = programs.compare(embeddings, texts.present).loss * groups
        keys = [
            [
                batch.tokens[row, first : last + 1].tobytes()
                for first, last, is_there in zip(
                    texts.firsts[row], texts.lasts[row], texts.present[row], strict=True
                )
                if is_there
            ]
            for row in range(groups)
        ]
        return cls(keys, embeddings[:groups], loss, batch.size)
