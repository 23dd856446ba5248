"""Into how many groups a step is divided, for the ranks that there are."""

from dataclasses import replace

from llamatrain.config.options import OptionError
from llamatrain.errors import UsageError
from llamatrain.machine.world import launched
from llamatrain.recipe.asked import Asked

GROUPS = 8


def divided(asked: Asked, ranks: int, planned: bool = False) -> Asked:
    """With --shards decided, and with batches in as many parts as that takes; `planned`: the ranks are to come."""
    train = asked.train
    splits = asked.preference.compare != "answers"  # which are compared within a batch
    rows = train.grad_acc * (train.batch if splits else 1)
    groups = train.shards or default(rows, ranks, planned or launched() is not None)
    if groups > rows:
        told = f" {groups} cannot be: a step has {rows} {'rows' if splits else 'batches, which are compared as wholes'}"
        raise OptionError(lambda spelt: spelt("shards") + told)
    if ranks > groups and train.shards:
        told = f" {groups} are divided among so many ranks at most, and there are {ranks}"
        raise OptionError(lambda spelt: spelt("shards") + told)
    if ranks > groups:
        raise UsageError(f"a step of {rows} rows cannot be divided among {ranks} ranks: --batch and --grad-acc make it larger")
    if groups == 1:
        return asked
    parts = next(parts for parts in range(1, train.batch + 1) if train.batch % parts == 0 and train.grad_acc * parts >= groups)
    batch, batches = train.batch // parts, train.grad_acc * parts
    return replace(asked, train=replace(train, shards=groups, batch=batch, grad_acc=batches))


def default(rows: int, ranks: int, several: bool) -> int:
    """As many as there are for eight ranks, or more; one where there are none."""
    if not several:
        return 1
    most = 1 << (rows.bit_length() - 1)
    return min(most, max(GROUPS, 1 << (ranks - 1).bit_length()))
