"""The kinds of rows that training and evaluation read: plain ones, compared answers, and groups of texts."""

from typing import NamedTuple

from llamatrain.contrastive.batches import GroupBatches
from llamatrain.contrastive.dataset import GroupDataset, GroupShard
from llamatrain.data.batches import Batches
from llamatrain.data.dataset import PLAIN_KIND, Dataset, DatasetKind, Shard
from llamatrain.data.preference_records import ComparedKind
from llamatrain.preference.batches import KtoBatches, PairBatches
from llamatrain.preference.dataset import LabelledShard, PairShard, PreferenceDataset


class RowKind(NamedTuple):
    """A kind of rows: the classes that turn documents into samples, and samples into rows."""

    dataset: DatasetKind
    batches: type[Batches]
    unit: str  # what a sample is called, in the plural


KINDS: dict[ComparedKind | None, RowKind] = {
    None: RowKind(PLAIN_KIND, Batches, "samples"),
    "pairs": RowKind(DatasetKind(PairShard, PreferenceDataset, "pairs"), PairBatches, "pairs"),
    "answers": RowKind(DatasetKind(LabelledShard, PreferenceDataset, "answers"), KtoBatches, "answers"),
    "judged texts": RowKind(DatasetKind(Shard, Dataset, "judged texts"), Batches, "samples"),
    "texts": RowKind(DatasetKind(GroupShard, GroupDataset, "texts"), GroupBatches, "groups"),
}


def widen_groups(*datasets: Dataset | None) -> int:
    """Give all datasets of groups the same number of texts in a row, and return it; 0 if there are no groups."""
    groups = [dataset for dataset in datasets if isinstance(dataset, GroupDataset)]
    widest = max((dataset.texts_per_row for dataset in groups), default=0)
    for dataset in groups:
        dataset.texts_per_row = widest
    return widest
