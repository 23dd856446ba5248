"""Things of some size into as few rows as will do."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence


def best_fit(sizes: Mapping[int, int], room: int) -> list[list[int]]:
    """The largest first, each into the fullest row that has room for it; in rows, and rows among themselves, by their numbers."""
    free = list[tuple[int, int]]()  # (room, number of the row), least room first
    rows = list[list[int]]()
    for one in sorted(sizes, key=lambda one: -sizes[one]):
        at = bisect_left(free, (sizes[one], -1))
        left, number = free.pop(at) if at < len(free) else (room, len(rows))
        if number == len(rows):
            rows.append([])
        rows[number].append(one)
        insort(free, (left - sizes[one], number))
    return sorted(map(sorted, rows))


Planned = tuple[
    Sequence[Sequence[int]], int
]  # rows, each by the places of its samples, and the place after them


class RowCursor:
    """`plan` says of a place which rows begin there; they are kept until all are gone past."""

    def __init__(self, plan: Callable[[int], Planned], place: int, row: int) -> None:
        self.plan, self.place, self.row = plan, place, row
        self._rows, self._after = plan(place) if row else ([], place)

    @property
    def lost(self) -> bool:
        """Whether there is no such row."""
        return self.row > 0 and self.row >= len(self._rows)

    @property
    def taken(self) -> int:
        """Samples from the place on, in the rows gone past."""
        return sum(map(len, self._rows[: self.row]))

    def next(self) -> Sequence[int]:
        if not self.row:
            self._rows, self._after = self.plan(self.place)
        row = self._rows[self.row]
        self.row += 1
        if self.row == len(self._rows):
            self.place, self.row = self._after, 0
        return row

    def until(self, place: int, count: int) -> Iterator[list[Sequence[int]]]:
        """So many rows together, the last ones fewer, of those that begin before a place."""
        while self.place < place:
            rows = [self.next()]
            while len(rows) < count and self.place < place:
                rows.append(self.next())
            yield rows
