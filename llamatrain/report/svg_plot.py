"""Draws loss.svg: the losses of a run as a self-contained picture for light and dark pages."""

from collections.abc import Iterator

from llamatrain.report.format import escape_markup, format_loss
from llamatrain.report.series import Losses, Series, ticks

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 64, 48
MAX_DOTS = 60  # of validations
MAX_TITLE = 60  # characters
STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; fill: #6b7280 }
.title { font-size: 15px; font-weight: 600; fill: #1f2937 }
.page { fill: #ffffff }
.grid { stroke: #e5e7eb }
polyline { fill: none; stroke-width: 2.2; stroke-linejoin: round; stroke-linecap: round }
circle { stroke-width: 2; fill: #ffffff }
.training { stroke: #2563eb }
.validation { stroke: #ea580c }
.retained { stroke: #16a34a }
circle.best { fill: #ea580c }
.noise { stroke-width: 1; stroke-opacity: 0.35 }
@media (prefers-color-scheme: dark) {
  text { fill: #9ca3af }
  .title { fill: #f3f4f6 }
  .page, circle { fill: #111827 }
  .grid { stroke: #374151 }
  .training { stroke: #60a5fa }
  .validation { stroke: #fb923c }
  .retained { stroke: #4ade80 }
  circle.best { fill: #fb923c }
}
"""


def draw_svg(losses: Losses, name: str) -> str:
    """Return the text of loss.svg; `name` is the title."""
    title = escape_markup(name if len(name) <= MAX_TITLE else f"...{name[3 - MAX_TITLE :]}")
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{title}</title>",
        f"<style>{STYLE}</style>",
        f'<clipPath id="plot"><rect x="{LEFT - 5}" y="{TOP}" width="{wide + 10}" height="{high + 5}"/></clipPath>',
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
        f'<text class="title" x="{LEFT}" y="26">{title}</text>',
        *draw_legend(losses),
        *draw_axes(losses),
        '<g clip-path="url(#plot)">',
        *draw_polyline(losses, losses.training.thin(), "training noise"),
        *draw_polyline(losses, losses.smooth.thin(), "training"),
        *draw_polyline(losses, losses.retained.thin(), "retained"),
        *draw_polyline(losses, losses.validation.thin(), "validation"),
        *draw_dots(losses, losses.smooth, "training", 1),  # a single step is a dot, not a line
        *draw_dots(losses, losses.retained, "retained", MAX_DOTS),
        *draw_dots(losses, losses.validation, "validation", MAX_DOTS),
        *draw_dots(losses, losses.best, "validation best", 1),
        "</g>",
        "</svg>\n",
    ]
    return "\n".join(parts)


def draw_legend(losses: Losses) -> Iterator[str]:
    """Yield the legend with the last values."""
    at, best = LEFT, losses.best
    lowest = f" (best {format_loss(best.values[0])} at step {best.steps[0]:,.0f})" if len(best) else ""
    for series, name, how in (
        (losses.smooth, "training", " (smoothed)"),
        (losses.validation, "validation", lowest),
        (losses.retained, "retained", ""),
    ):
        if len(series):
            label = f"{name} loss {format_loss(series.values[-1])}{how}"
            yield f'<polyline class="{name}" points="{at},44 {at + 18},44"/><text x="{at + 25}" y="48">{label}</text>'
            at += 250
    if at == LEFT:
        yield f'<text x="{at}" y="48">no losses yet</text>'


def draw_axes(losses: Losses) -> Iterator[str]:
    """Yield both axes with grid and labels."""
    bottom, end = HEIGHT - BOTTOM, WIDTH - RIGHT
    yield f'<line class="grid" x1="{LEFT}" y1="{bottom}" x2="{end}" y2="{bottom}"/>'
    for value, label in ticks(losses.low, losses.high, 6):
        y = y_position(losses, value)
        yield f'<line class="grid" x1="{LEFT}" y1="{y}" x2="{end}" y2="{y}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    for step, label in ticks(*losses.step_range, 8, whole=True):
        x = x_position(losses, step)
        yield f'<line class="grid" x1="{x}" y1="{bottom}" x2="{x}" y2="{bottom + 5}"/>'
        yield f'<text x="{x}" y="{bottom + 19}" text-anchor="middle">{label}</text>'
    yield f'<text x="{(LEFT + end) / 2}" y="{HEIGHT - 10}" text-anchor="middle">step</text>'


def x_position(losses: Losses, step: float) -> float:
    """Return the x coordinate of a step."""
    first, last = losses.step_range
    return round(LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT), 1)


def y_position(losses: Losses, value: float) -> float:
    """Return the y coordinate of a value; values far above the plot are drawn slightly above it and clipped."""
    part = (value - losses.low) / (losses.high - losses.low)
    return round(HEIGHT - BOTTOM - min(part, 1.5) * (HEIGHT - TOP - BOTTOM), 1)


def plot_points(losses: Losses, series: Series) -> Iterator[tuple[float, float]]:
    """Yield the coordinates of a series."""
    for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
        yield x_position(losses, step), y_position(losses, value)


def draw_polyline(losses: Losses, series: Series, kind: str) -> Iterator[str]:
    """Yield a series as a line."""
    if len(series) > 1:
        yield f'<polyline class="{kind}" points="{" ".join(f"{x},{y}" for x, y in plot_points(losses, series))}"/>'


def draw_dots(losses: Losses, series: Series, kind: str, limit: int) -> Iterator[str]:
    """Yield a series as dots, unless there are too many."""
    if len(series) <= limit:
        yield from (
            f'<circle class="{kind}" cx="{x}" cy="{y}" r="3.2"/>' for x, y in plot_points(losses, series)
        )
