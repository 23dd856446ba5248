"""Data dealt to training and validation, by a seed."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from llamatrain.config.options import flag_of
from llamatrain.data.shuffle import Permutation
from llamatrain.errors import DataError

if TYPE_CHECKING:
    from llamatrain.data.dataset import Shard

SPLIT = 0x5911  # keeps the shuffle of the split apart from those of the epochs


def split(parts: "list[Shard]", name: str, share: float, seed: int) -> "tuple[list[Shard], list[Shard]]":
    """Documents dealt to training and validation by the seed; those of one line stay together."""
    pieces = [part.dealt() for part in parts]
    units = [np.unique(part.documents[["file", "line"]], return_inverse=True)[1] for part in pieces]
    starts = np.cumsum([0, *(int(unit.max()) + 1 if len(unit) else 0 for unit in units)])
    total = int(starts[-1])
    if total < 2:
        more = f"give more data, or a file with {flag_of('val')}"
        raise DataError(f"{name}: one sample cannot be split in two; {more}")
    dealt = Permutation(total, seed, SPLIT)
    kept = np.zeros(total, bool)
    kept[[dealt[place] for place in range(min(max(1, round(share * total)), total - 1))]] = True
    chosen = [kept[start + unit] for start, unit in zip(starts, units, strict=False)]
    train = [part.take(~held) for part, held in zip(pieces, chosen, strict=True)]
    validation = [
        replace(part.take(held), overlapping=False) for part, held in zip(pieces, chosen, strict=True)
    ]
    return train, validation
