"""Charts for HTML pages: an SVG of lines that is stretched to its container, with labels as HTML around it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from llamatrain.report.format import escape_markup, format_loss
from llamatrain.report.series import Series, axis_bounds, ticks

SIDE = 1000  # of a plot, in its own units
MAX_DOTS = 60  # of a curve
LETTERS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
OVERSHOOT = 1.03  # values beyond the axis are drawn at this share of its length


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A curve of a chart."""

    series: Series
    kind: str  # CSS class
    dotted: bool = False
    errors: Series | None = None  # standard errors
    best: Series | None = None


@dataclass(frozen=True, kw_only=True)
class PlotArea:
    """The ranges of both axes."""

    low: float
    high: float
    first: float
    last: float

    @classmethod
    def fit(cls, curves: Sequence[Curve], bounds_of_values: tuple[float, float] | None = None) -> "PlotArea":
        """Return the area that shows these curves."""
        steps = np.concatenate([np.empty(0), *(line.series.steps for line in curves)])
        low, top = bounds_of_values or axis_bounds(
            np.concatenate([np.empty(0), *(line.series.values for line in curves)])
        )
        first, last = (float(steps.min()), float(steps.max())) if len(steps) else (0.0, 1.0)
        return (
            cls(low=low, high=top, first=first, last=last)
            if first < last
            else cls(low=low, high=top, first=first - 1, last=last + 1)
        )

    def x(self, step: float) -> float:
        """Return the x coordinate of a step."""
        return round((step - self.first) / (self.last - self.first) * SIDE, 1)

    def y(self, value: float) -> float:
        """Return the y coordinate of a value; values outside the range are drawn slightly beyond the edge."""
        part = (value - self.low) / (self.high - self.low)
        return round(SIDE - max(min(part, OVERSHOOT), 1 - OVERSHOOT) * SIDE, 1)

    def points(self, series: Series) -> str:
        """Return the points of a series for an SVG polyline."""
        pairs = zip(series.steps.tolist(), series.values.tolist(), strict=True)
        return " ".join(f"{self.x(step)},{self.y(value)}" for step, value in pairs)


def chart(title: str, caption: str, curves: Sequence[Curve], axes: PlotArea, size: str = "") -> str:
    """Return a chart as an HTML figure; `caption` is markup."""
    rows = shorten_labels(ticks(axes.low, axes.high, 5))
    columns = shorten_labels(ticks(axes.first, axes.last, 5, whole=True))
    left = "".join(
        f'<span style="bottom:{percent(SIDE - axes.y(position))}%">{label}</span>' for position, label in rows
    )
    below = "".join(
        f'<span style="left:{percent(axes.x(position))}%">{label}</span>' for position, label in columns
    )
    grid = "".join(f'<path class="grid" d="M0 {axes.y(position)}h{SIDE}"/>' for position, _ in rows)
    curves_svg = "".join(part for line in curves for part in curve_svg(line, axes))
    data = f'data-x="{axes.first!r} {axes.last!r}" data-y="{axes.low!r} {axes.high!r}"'
    return (
        f'<figure class="chart {size}"><figcaption><b>{escape_markup(title)}</b> <span>{caption}</span></figcaption>'
        f'<div class="plot"><div class="ys">{left}</div>'
        f'<svg viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none" role="img" aria-label="{escape_markup(title)}" {data}>'
        f'{grid}{curves_svg}</svg><div class="xs">{below}</div></div></figure>\n'
    )


def shorten_labels(labels: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Write thousands and millions of round numbers with letters."""
    most = max((abs(value) for value, _ in labels), default=0.0)
    size, letter = next((unit for unit in LETTERS if 10 * unit[0] <= most < 1e13), (1, ""))
    return (
        [(value, f"{value / size:g}{letter}" if value else "0") for value, _ in labels] if letter else labels
    )


def percent(position: float) -> str:
    """Return a position in percent."""
    return f"{100 * position / SIDE:.4g}"


def curve_svg(line: Curve, axes: PlotArea) -> Iterator[str]:
    """Yield the error band, the line and the dots of a curve."""
    thin = line.series.thin()
    if line.errors is not None:
        yield from error_band(line.series, line.errors, line.kind, axes)
    if len(thin) > 1:
        yield f'<polyline class="{line.kind}" points="{axes.points(thin)}"/>'
    if (line.dotted and len(line.series) <= MAX_DOTS) or len(line.series) == 1:
        yield from dots_svg(line.series, line.errors, f"{line.kind} dot", axes)
    if line.best is not None and len(line.best):
        yield from dots_svg(line.best, None, f"{line.kind} dot best", axes)


def error_band(series: Series, errors: Series, kind: str, axes: PlotArea) -> Iterator[str]:
    """Yield the band of one standard error on both sides."""
    steps, series_indices, error_indices = np.intersect1d(series.steps, errors.steps, return_indices=True)
    if len(steps) < 2:
        return
    selected = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), 500)).astype(int))
    values, spread = series.values[series_indices][selected], errors.values[error_indices][selected]
    above = Series(steps[selected], values + spread)
    below = Series(steps[selected][::-1], (values - spread)[::-1])
    yield f'<polygon class="{kind} band" points="{axes.points(above)} {axes.points(below)}"/>'


def dots_svg(series: Series, errors: Series | None, kind: str, axes: PlotArea) -> Iterator[str]:
    """Yield dots as zero-length lines with round caps, which stay round when the plot is stretched."""
    spread = (
        dict(zip(errors.steps.tolist(), errors.values.tolist(), strict=True)) if errors is not None else {}
    )
    for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
        title = f"step {step:,.0f}: {format_loss(value)}" + (
            f" ± {format_loss(spread[step])}" if step in spread else ""
        )
        yield f'<path class="{kind}" d="M{axes.x(step)} {axes.y(value)}h0"><title>{title}</title></path>'
