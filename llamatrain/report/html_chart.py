"""Curves in a page: an SVG of lines alone, which is stretched to the place there is, and words beside it that are not."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from llamatrain.report.format import amount, marked
from llamatrain.report.series import Series, bounds, ticks

SIDE = 1000  # of a plot, in its own units
DOTS = 60  # that a line has at most
LETTERS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
TOWERS = 1.03  # as high as what goes beyond the axis is drawn


@dataclass(frozen=True, kw_only=True)
class Curve:
    series: Series
    kind: str  # a class of the style sheet
    dotted: bool = False
    errors: Series | None = None  # the standard error of each value
    best: Series | None = None


@dataclass(frozen=True, kw_only=True)
class PlotArea:
    """What a plot goes from and to."""

    low: float
    high: float
    first: float
    last: float

    @classmethod
    def around(cls, lines: Sequence[Curve], high: tuple[float, float] | None = None) -> "PlotArea":
        steps = np.concatenate([np.empty(0), *(line.series.steps for line in lines)])
        low, top = high or bounds(np.concatenate([np.empty(0), *(line.series.values for line in lines)]))
        first, last = (float(steps.min()), float(steps.max())) if len(steps) else (0.0, 1.0)
        return (
            cls(low=low, high=top, first=first, last=last)
            if first < last
            else cls(low=low, high=top, first=first - 1, last=last + 1)
        )

    def x(self, step: float) -> float:
        return round((step - self.first) / (self.last - self.first) * SIDE, 1)

    def y(self, value: float) -> float:
        part = (value - self.low) / (self.high - self.low)
        return round(SIDE - max(min(part, TOWERS), 1 - TOWERS) * SIDE, 1)

    def points(self, series: Series) -> str:
        pairs = zip(series.steps.tolist(), series.values.tolist(), strict=True)
        return " ".join(f"{self.x(step)},{self.y(value)}" for step, value in pairs)


def chart(title: str, told: str, lines: Sequence[Curve], axes: PlotArea, size: str = "") -> str:
    """A figure with its caption, which is markup."""
    rows, columns = short(ticks(axes.low, axes.high, 5)), short(ticks(axes.first, axes.last, 5, whole=True))
    left = "".join(f'<span style="bottom:{place(SIDE - axes.y(at))}%">{label}</span>' for at, label in rows)
    below = "".join(f'<span style="left:{place(axes.x(at))}%">{label}</span>' for at, label in columns)
    grid = "".join(f'<path class="grid" d="M0 {axes.y(at)}h{SIDE}"/>' for at, _ in rows)
    drawn = "".join(part for line in lines for part in drawn_of(line, axes))
    asked = f'data-x="{axes.first!r} {axes.last!r}" data-y="{axes.low!r} {axes.high!r}"'
    return (
        f'<figure class="chart {size}"><figcaption><b>{marked(title)}</b> <span>{told}</span></figcaption>'
        f'<div class="plot"><div class="ys">{left}</div>'
        f'<svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none" role="img" aria-label="{marked(title)}" {asked}>'
        f'{grid}{drawn}</svg><div class="xs">{below}</div></div></figure>\n'
    )


def short(places: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Thousands and millions of round numbers are letters."""
    most = max((abs(at) for at, _ in places), default=0.0)
    size, letter = next((each for each in LETTERS if 10 * each[0] <= most < 1e13), (1, ""))
    return [(at, f"{at / size:g}{letter}" if at else "0") for at, _ in places] if letter else places


def place(at: float) -> str:
    return f"{100 * at / SIDE:.4g}"


def drawn_of(line: Curve, axes: PlotArea) -> Iterator[str]:
    """Its band, the line and its dots."""
    thin = line.series.thinned()
    if line.errors is not None:
        yield from band(line.series, line.errors, line.kind, axes)
    if len(thin) > 1:
        yield f'<polyline class="{line.kind}" points="{axes.points(thin)}"/>'
    if (line.dotted and len(line.series) <= DOTS) or len(line.series) == 1:
        yield from dots(line.series, line.errors, f"{line.kind} dot", axes)
    if line.best is not None and len(line.best):
        yield from dots(line.best, None, f"{line.kind} dot best", axes)


def band(series: Series, errors: Series, kind: str, axes: PlotArea) -> Iterator[str]:
    """As far as a standard error goes on both sides."""
    steps, here, there = np.intersect1d(series.steps, errors.steps, return_indices=True)
    if len(steps) < 2:
        return
    kept = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), 500)).astype(int))
    values, spread = series.values[here][kept], errors.values[there][kept]
    above, below = Series(steps[kept], values + spread), Series(steps[kept][::-1], (values - spread)[::-1])
    yield f'<polygon class="{kind} band" points="{axes.points(above)} {axes.points(below)}"/>'


def dots(series: Series, errors: Series | None, kind: str, axes: PlotArea) -> Iterator[str]:
    """Points of no length with round ends: they stay round however the plot is stretched."""
    spread = (
        dict(zip(errors.steps.tolist(), errors.values.tolist(), strict=True)) if errors is not None else {}
    )
    for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
        told = f"step {step:,.0f}: {amount(value)}" + (f" ± {amount(spread[step])}" if step in spread else "")
        yield f'<path class="{kind}" d="M{axes.x(step)} {axes.y(value)}h0"><title>{told}</title></path>'
