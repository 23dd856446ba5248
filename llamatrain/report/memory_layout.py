"""The data of the memory map: the arena of a plan, calls on one axis, addresses on the other.

The largest tensors are rectangles with names; the others are painted on a grid, so that the picture has a
bounded size for any model.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from llamatrain.engine.lifetimes import KINDS, Lifetime, find_peak, list_lifetimes
from llamatrain.engine.plan import Plan

MAX_NAMED, MAX_CELLS = 1000, 3000  # rectangles with names, and of the grid
GRID = 960, 480
MAX_NAME = 80  # characters
MAX_ALIVE = 8  # tensors listed at the peak
LARGEST = 1 << 60


class MapCell(NamedTuple):
    """A rectangle of grid cells of one kind."""

    kind: int
    x: int
    y: int
    width: int
    height: int


@dataclass(frozen=True, kw_only=True)
class MemoryLayout:
    """The content of the memory map."""

    calls: int
    size: int  # bytes
    peak: int  # index of a call
    peak_name: str
    at_peak: dict[str, int]  # bytes by kind
    alive: tuple[tuple[str, int], ...]
    named: tuple[Lifetime, ...]
    grid: tuple[int, int]
    specks: tuple[MapCell, ...]

    @classmethod
    def from_plan(cls, plan: Plan) -> Self | None:
        """Return the layout of a plan, or None if its arena is empty."""
        lifetimes = sorted(list_lifetimes(plan), key=lambda life: -(life.last + 1 - life.first) * life.size)
        peak = find_peak(plan)
        if peak is None or not lifetimes:
            return None
        call, name = peak
        alive = sorted(
            (life for life in lifetimes if life.first <= call <= life.last), key=lambda life: -life.size
        )
        named, rest = lifetimes[:MAX_NAMED], lifetimes[MAX_NAMED:]
        calls, size = len(plan.nodes), max(plan.arena, *(life.offset + life.size for life in lifetimes))
        grid, specks = paint_grid(rest, calls, size)
        return cls(
            calls=calls,
            size=size,
            peak=call,
            peak_name=name[:MAX_NAME],
            at_peak={
                kind: bytes_of_kind
                for kind in KINDS
                if (bytes_of_kind := sum(life.size for life in alive if life.kind == kind))
            },
            alive=tuple((life.name[:MAX_NAME], life.size) for life in alive[:MAX_ALIVE]),
            named=tuple(life._replace(name=life.name[:MAX_NAME]) for life in named),
            grid=grid,
            specks=specks,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the layout as plain values."""
        named = [[KINDS.index(life.kind), *life[1:]] for life in self.named]
        values = {
            name: getattr(self, name)
            for name in ("calls", "size", "peak", "peak_name", "at_peak", "alive", "grid", "specks")
        }
        return {**values, "named": named}

    @classmethod
    def from_json(cls, data: Any) -> Self | None:
        """Return the layout in untrusted JSON, or None if it is invalid."""
        try:
            arena = cls(
                **{name: check_int(data[name]) for name in ("calls", "size", "peak")},
                peak_name=check_name(data["peak_name"]),
                at_peak={kind: check_int(data["at_peak"][kind]) for kind in KINDS if kind in data["at_peak"]},
                alive=tuple((check_name(name), check_int(size)) for name, size in data["alive"][:MAX_ALIVE]),
                named=tuple(read_lifetime(*value) for value in data["named"][:MAX_NAMED]),
                grid=(check_int(data["grid"][0]), check_int(data["grid"][1])),
                specks=tuple(MapCell(*map(check_int, value)) for value in data["specks"][:MAX_CELLS]),
            )
        except (KeyError, TypeError, ValueError, IndexError):
            return None
        is_valid = 0 <= arena.peak < arena.calls and arena.size and all(arena.grid)
        return arena if is_valid and all(speck.kind < len(KINDS) for speck in arena.specks) else None


def check_int(value: Any) -> int:
    """Return a value that must be an integer in range."""
    if type(value) is not int or not 0 <= value < LARGEST:
        raise ValueError
    return value


def check_name(value: Any) -> str:
    """Return a value that must be a string, truncated."""
    if not isinstance(value, str):
        raise TypeError
    return value[:MAX_NAME]


def read_lifetime(kind: Any, name: Any, first: Any, last: Any, offset: Any, size: Any) -> Lifetime:
    """Return a lifetime from plain values."""
    if check_int(first) > check_int(last):
        raise ValueError
    return Lifetime(KINDS[check_int(kind)], check_name(name), first, last, check_int(offset), check_int(size))


# ---- what is too small for a name -------------------------------------------


def paint_grid(
    lives: Sequence[Lifetime], calls: int, size: int
) -> tuple[tuple[int, int], tuple[MapCell, ...]]:
    """Paint lifetimes on the finest grid that gives few enough cells."""
    columns, rows = GRID
    while True:
        cells = np.full((rows, columns), -1, np.int8)
        for life in reversed(lives):  # the largest on top
            left, right = life.first * columns // calls, -(-(life.last + 1) * columns // calls)
            low, high = life.offset * rows // size, -(-(life.offset + life.size) * rows // size)
            cells[low:high, left:right] = KINDS.index(life.kind)
        specks = tuple(merge_cells(row_cells(cells)))
        if len(specks) <= MAX_CELLS or columns < 4:
            return (columns, rows), specks[:MAX_CELLS]
        columns, rows = columns // 2, rows // 2


def row_cells(cells: np.ndarray) -> Iterator[MapCell]:
    """Yield the runs of one kind in each row."""
    for y, row in enumerate(cells):
        begins = np.flatnonzero(np.diff(row, prepend=-2))
        for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(row)], strict=True):
            if row[begin] >= 0:
                yield MapCell(int(row[begin]), begin, y, end - begin, 1)


def merge_cells(runs: Iterable[MapCell]) -> Iterator[MapCell]:
    """Merge runs of one kind over the same columns in consecutive rows."""
    unfinished = dict[tuple[int, int, int], MapCell]()
    for run in runs:
        key = run.kind, run.x, run.width
        below = unfinished.get(key)
        if below and below.y + below.height == run.y:
            unfinished[key] = below._replace(height=below.height + 1)
            continue
        if below:
            yield below
        unfinished[key] = run
    yield from unfinished.values()
