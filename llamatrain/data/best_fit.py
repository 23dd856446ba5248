"""Things of some size into as few rows as will do."""

from bisect import bisect_left, insort
from collections.abc import Mapping


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
