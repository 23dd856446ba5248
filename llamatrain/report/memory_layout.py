"""The memory map: the arena of a plan as a picture, calls from left to right, addresses from below.

Of many tensors the largest are rectangles with names; the others are painted on a grid, so that a picture has a bounded size,
however deep the model is.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from llamatrain.engine.lifetimes import KINDS, Lifetime, find_peak, list_lifetimes
from llamatrain.engine.plan import Plan

NAMED, SPECKS = 1000, 3000  # rectangles, at most: with names, and of the grid
GRID = 960, 480
LONGEST = 80  # signs of a name
ALIVE = 8  # that are told at the peak
MOST = 1 << 60


class MapCell(NamedTuple):
    """Cells of the grid that are side by side and of one kind."""

    kind: int
    x: int
    y: int
    width: int
    height: int


@dataclass(frozen=True, kw_only=True)
class MemoryLayout:
    """What the map shows."""

    calls: int
    size: int  # bytes
    peak: int  # a call
    peak_name: str
    at_peak: dict[str, int]  # bytes by kind
    alive: tuple[tuple[str, int], ...]
    named: tuple[Lifetime, ...]
    grid: tuple[int, int]
    specks: tuple[MapCell, ...]

    @classmethod
    def of(cls, plan: Plan) -> Self | None:
        """None where nothing lies in the arena."""
        found = sorted(list_lifetimes(plan), key=lambda life: -(life.last + 1 - life.first) * life.size)
        peak = find_peak(plan)
        if peak is None or not found:
            return None
        place, name = peak
        there = sorted(
            (life for life in found if life.first <= place <= life.last), key=lambda life: -life.size
        )
        named, rest = found[:NAMED], found[NAMED:]
        calls, size = len(plan.nodes), max(plan.arena, *(life.offset + life.size for life in found))
        grid, specks = painted(rest, calls, size)
        return cls(
            calls=calls,
            size=size,
            peak=place,
            peak_name=name[:LONGEST],
            at_peak={
                kind: taken
                for kind in KINDS
                if (taken := sum(life.size for life in there if life.kind == kind))
            },
            alive=tuple((life.name[:LONGEST], life.size) for life in there[:ALIVE]),
            named=tuple(life._replace(name=life.name[:LONGEST]) for life in named),
            grid=grid,
            specks=specks,
        )

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        named = [[KINDS.index(life.kind), *life[1:]] for life in self.named]
        told = {
            name: getattr(self, name)
            for name in ("calls", "size", "peak", "peak_name", "at_peak", "alive", "grid", "specks")
        }
        return {**told, "named": named}

    @classmethod
    def read(cls, kept: Any) -> Self | None:
        """From JSON that anybody may have written: None where it is no map."""
        try:
            arena = cls(
                **{name: whole(kept[name]) for name in ("calls", "size", "peak")},
                peak_name=word(kept["peak_name"]),
                at_peak={kind: whole(kept["at_peak"][kind]) for kind in KINDS if kind in kept["at_peak"]},
                alive=tuple((word(name), whole(size)) for name, size in kept["alive"][:ALIVE]),
                named=tuple(life_of(*value) for value in kept["named"][:NAMED]),
                grid=(whole(kept["grid"][0]), whole(kept["grid"][1])),
                specks=tuple(MapCell(*map(whole, value)) for value in kept["specks"][:SPECKS]),
            )
        except (KeyError, TypeError, ValueError, IndexError):
            return None
        sound = 0 <= arena.peak < arena.calls and arena.size and all(arena.grid)
        return arena if sound and all(speck.kind < len(KINDS) for speck in arena.specks) else None


def whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MOST:
        raise ValueError
    return value


def word(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value[:LONGEST]


def life_of(kind: Any, name: Any, first: Any, last: Any, offset: Any, size: Any) -> Lifetime:
    if whole(first) > whole(last):
        raise ValueError
    return Lifetime(KINDS[whole(kind)], word(name), first, last, whole(offset), whole(size))


# ---- what is too small for a name -------------------------------------------


def painted(lives: Sequence[Lifetime], calls: int, size: int) -> tuple[tuple[int, int], tuple[MapCell, ...]]:
    """On the finest grid that is not too much to be drawn."""
    columns, rows = GRID
    while True:
        cells = np.full((rows, columns), -1, np.int8)
        for life in reversed(lives):  # the largest last
            left, right = life.first * columns // calls, -(-(life.last + 1) * columns // calls)
            low, high = life.offset * rows // size, -(-(life.offset + life.size) * rows // size)
            cells[low:high, left:right] = KINDS.index(life.kind)
        specks = tuple(joined(runs(cells)))
        if len(specks) <= SPECKS or columns < 4:
            return (columns, rows), specks[:SPECKS]
        columns, rows = columns // 2, rows // 2


def runs(cells: np.ndarray) -> Iterator[MapCell]:
    """Row by row, what is of one kind."""
    for y, row in enumerate(cells):
        begins = np.flatnonzero(np.diff(row, prepend=-2))
        for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(row)], strict=True):
            if row[begin] >= 0:
                yield MapCell(int(row[begin]), begin, y, end - begin, 1)


def joined(found: Iterable[MapCell]) -> Iterator[MapCell]:
    """Runs of one kind over the same cells, row upon row, as one."""
    open_ = dict[tuple[int, int, int], MapCell]()
    for run in found:
        key = run.kind, run.x, run.width
        below = open_.get(key)
        if below and below.y + below.height == run.y:
            open_[key] = below._replace(height=below.height + 1)
            continue
        if below:
            yield below
        open_[key] = run
    yield from open_.values()
