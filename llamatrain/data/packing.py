"""Packs samples into rows, and walks over the rows without reading tokens."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence


def best_fit(sizes: Mapping[int, int], room: int) -> list[list[int]]:
    """Pack items into rows of `room`, the largest item first, each into the fullest row that fits it.

    Items in a row, and the rows, are sorted by the items' numbers.
    """
    free = list[tuple[int, int]]()  # (room left, row), the least room first
    rows = list[list[int]]()
    for item in sorted(sizes, key=lambda one: -sizes[one]):
        slot = bisect_left(free, (sizes[item], -1))
        room_left, row = free.pop(slot) if slot < len(free) else (room, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(item)
        insort(free, (room_left - sizes[item], row))
    return sorted(map(sorted, rows))


PlannedRows = tuple[Sequence[Sequence[int]], int]  # rows of sample indices, and the index after them


class RowCursor:
    """Walks over planned rows.

    `plan` returns the rows that begin at an index, which are all used before the next plan.
    """

    def __init__(self, plan: Callable[[int], PlannedRows], index: int, row: int) -> None:
        self.plan = plan
        self.index = index
        self.row = row
        self._rows, self._next_index = plan(index) if row else ([], index)

    @property
    def is_invalid(self) -> bool:
        """True if the cursor is at a row that does not exist."""
        return self.row > 0 and self.row >= len(self._rows)

    @property
    def samples_passed(self) -> int:
        """The number of samples in the rows passed since the last plan."""
        return sum(map(len, self._rows[: self.row]))

    def next_row(self) -> Sequence[int]:
        """Return the sample indices of the next row."""
        if not self.row:
            self._rows, self._next_index = self.plan(self.index)
        row = self._rows[self.row]
        self.row += 1
        if self.row == len(self._rows):
            self.index = self._next_index
            self.row = 0
        return row

    def rows_until(self, end: int, count: int) -> Iterator[list[Sequence[int]]]:
        """Yield the rows that begin before an index, `count` at a time; the last group may be smaller."""
        while self.index < end:
            rows = [self.next_row()]
            while len(rows) < count and self.index < end:
                rows.append(self.next_row())
            yield rows
