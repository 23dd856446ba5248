"""Compares the texts of a whole step, which its micro-batches contain."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from llamatrain.contrastive.inputs import texts_of
from llamatrain.data.batches import Batch
from llamatrain.distributed.comm import Comm
from llamatrain.train.evaluate import BatchLoss, stack_units
from llamatrain.train.programs import Comparison, EvalPrograms


def compare_texts(
    programs: EvalPrograms, comm: Comm, batches: Sequence[Batch]
) -> tuple[list[Batch], Comparison]:
    """Return this rank's micro-batches with the gradients of their embeddings, and the comparison of all ranks' texts."""
    own = [(programs.embed(batch), texts_of(batch).present) for batch in batches]
    gathered = comm.all_gather(own)
    everything = [part for parts in gathered for part in parts]
    embeddings, present = (np.concatenate(arrays) for arrays in zip(*everything, strict=True))
    comparison = programs.compare(embeddings, present)
    first = sum(len(part) for parts in gathered[: comm.rank] for part, _ in parts)
    with_gradients = list[Batch]()
    for batch in batches:
        rows = slice(first, first + len(batch.tokens))
        texts = replace(texts_of(batch), gradients=comparison.gradient[rows])
        with_gradients.append(replace(batch, texts=texts))
        first = rows.stop
    return with_gradients, comparison


def evaluate_texts(programs: EvalPrograms, batch: Batch) -> BatchLoss:
    """Compare the texts of a batch that has as many rows as a training step."""
    present = texts_of(batch).present
    comparison, count = programs.compare(embed_rows(programs, batch), present), int(present[:, 0].sum())
    losses = comparison.row_losses[present[:, 0]]
    return BatchLoss(
        loss=comparison.loss * count,
        weight=count,
        tokens=batch.size,
        correct=comparison.correct,
        units=stack_units(losses, np.ones(count)),
        judged=count,
    )


def embed_rows(programs: EvalPrograms, batch: Batch) -> np.ndarray:
    """Return the embeddings of a batch that has more rows than the programs."""
    return np.concatenate([programs.embed(part) for part in split_rows(batch, programs.spec.batch)])


def split_rows(batch: Batch, rows: int) -> Iterator[Batch]:
    """Yield parts of a batch of texts, with a number of rows each."""
    for first in range(0, len(batch.tokens), rows):
        part = slice(first, first + rows)
        arrays = {
            name: getattr(batch, name)[part]
            for name in ("tokens", "targets", "weights", "positions", "starts")
        }
        yield replace(batch, **arrays, texts=texts_of(batch).take(part))
