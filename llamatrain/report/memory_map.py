"""Draws the memory map: as a file of its own, and as a section of a page."""

from collections.abc import Iterator

from llamatrain.config.messages import shorten
from llamatrain.config.units import Size
from llamatrain.engine.lifetimes import KINDS, Kind
from llamatrain.report.format import escape_markup
from llamatrain.report.memory_layout import MemoryLayout
from llamatrain.report.series import ticks

WIDE, HIGH = 1200, 600  # of the picture, in its own units
LEFT, TOP, RIGHT, BOTTOM = 84, 92, 24, 132  # margins in an SVG file
LEGEND, LINE = 285, 18
MIN_EDGE = 5  # in the same units: smaller rectangles have no border
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
WORDS: dict[Kind, str] = {
    "forward": "forward, soon free",
    "kept": "kept for the backward pass",
    "again": "made again",
    "backward": "backward",
    "gradient": "gradients of weights",
    "optimizer": "the optimizer's",
    "scratch": "scratch of kernels",
}
LIGHT = ("#a5c8f4", "#2f6fd0", "#9b7fd6", "#f0b35a", "#dd6b3a", "#3fa37c", "#9aa3af")
DARK = ("#3d5f8c", "#6ea8f5", "#a48be0", "#c98f3c", "#ee8a5b", "#4fb78f", "#6b7480")
FACES = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"


def kind_colors(colors: tuple[str, ...]) -> str:
    """Return the CSS rules of the kinds' colors."""
    return " ".join(f".m-{kind} {{ fill: {color} }}" for kind, color in zip(KINDS, colors, strict=True))


STYLE = f"""
text {{ font: 13px {FACES}; fill: #5b6470 }}
.strong {{ font-size: 17px; font-weight: 600; fill: #1d2530 }}
.page {{ fill: #ffffff }}
.field {{ fill: #f3f5f8 }}
.grid {{ stroke: #d5dae1 }}
.m-peak {{ stroke: #c2255c; stroke-width: 1.5; stroke-dasharray: 5 4 }}
.apart {{ stroke: #ffffff; stroke-width: 0.6; vector-effect: non-scaling-stroke }}
{kind_colors(LIGHT)}
@media (prefers-color-scheme: dark) {{
  text {{ fill: #9aa4b2 }}
  .strong {{ fill: #eef1f5 }}
  .page {{ fill: #14181f }}
  .field {{ fill: #1b212a }}
  .grid {{ stroke: #39424f }}
  .m-peak {{ stroke: #ff7aa8 }}
  .apart {{ stroke: #14181f }}
  {kind_colors(DARK)}
}}
"""


def draw_svg(arena: MemoryLayout, title: str) -> str:
    """Return the map as an SVG file."""
    width, height = LEFT + WIDE + RIGHT, TOP + HIGH + BOTTOM
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">'
    parts = [
        head,
        f"<title>{escape_markup(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{width}" height="{height}" rx="8"/>',
        f'<text class="strong" x="{LEFT}" y="36">{escape_markup(title)}</text>',
        f'<text x="{LEFT}" y="60">{escape_markup(describe(arena))}</text>',
        *draw_axes(arena),
        f'<g transform="translate({LEFT} {TOP})"><rect class="field" width="{WIDE}" height="{HIGH}"/>',
        *draw_tensors(arena),
        "</g>",
        *draw_legend(arena),
        "</svg>\n",
    ]
    return "\n".join(parts)


def describe(arena: MemoryLayout) -> str:
    """Describe size and peak in words."""
    size = Size(arena.size).text
    return (
        f"{arena.calls:,} calls in an arena of {size}; it is fullest at call {arena.peak + 1:,}, "
        f"{arena.peak_name}"
    )


def draw_tensors(arena: MemoryLayout) -> Iterator[str]:
    """Yield the tensors and the peak, on WIDE times HIGH."""
    columns, rows = arena.grid
    across, up = WIDE / columns, HIGH / rows
    for number, kind in enumerate(KINDS):
        if cells := [speck for speck in arena.specks if speck.kind == number]:
            steps = "".join(
                f"M{c.x * across:.4g} "
                f"{HIGH - (c.y + c.height) * up:.4g}h{c.width * across:.4g}v{c.height * up:.4g}"
                f"h-{c.width * across:.4g}z"
                for c in cells
            )
            yield f'<path class="m-{kind}" d="{steps}"/>'
    for life in arena.named:
        x, end = life.first / arena.calls * WIDE, (life.last + 1) / arena.calls * WIDE
        y, height = HIGH - (life.offset + life.size) / arena.size * HIGH, life.size / arena.size * HIGH
        edge_class = " apart" if min(end - x, height) > MIN_EDGE else ""
        calls = (
            f"call {life.first + 1:,}"
            if life.first == life.last
            else f"calls {life.first + 1:,} to {life.last + 1:,}"
        )
        yield (
            f'<rect class="m-{life.kind}{edge_class}" x="{x:.2f}" y="{y:.2f}" width="{end - x:.2f}" height="{height:.2f}">'
            f"<title>{escape_markup(life.name)}: {Size(life.size).text}, {calls}</title></rect>"
        )
    x = (arena.peak + 0.5) / arena.calls * WIDE
    yield f'<line class="m-peak" x1="{x:.2f}" y1="0" x2="{x:.2f}" y2="{HIGH}" vector-effect="non-scaling-stroke"/>'


def byte_ticks(arena: MemoryLayout, count: int) -> list[tuple[float, str]]:
    """Return ticks of the address axis in one unit, as shares of its length."""
    scale, unit = next((entry for entry in UNITS if arena.size >= entry[0]), UNITS[-1])
    return [
        (position * scale / arena.size, f"{label} {unit}")
        for position, label in ticks(0.0, arena.size / scale, count)
    ]


def call_ticks(arena: MemoryLayout, count: int) -> list[tuple[float, str]]:
    """Return ticks of the axis of calls, as shares of its length."""
    return [
        (position / arena.calls, label)
        for position, label in ticks(0.0, float(max(arena.calls, 1)), count, whole=True)
    ]


def draw_axes(arena: MemoryLayout) -> Iterator[str]:
    """Yield both axes and the label of the peak."""
    bottom = TOP + HIGH
    for position, label in byte_ticks(arena, 6):
        y = bottom - position * HIGH
        yield f'<line class="grid" x1="{LEFT - 5}" y1="{y:.1f}" x2="{LEFT}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 9}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    for position, label in call_ticks(arena, 8):
        x = LEFT + position * WIDE
        yield f'<line class="grid" x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 5}"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{label}</text>'
    peak = LEFT + (arena.peak + 0.5) / arena.calls * WIDE
    anchor = "end" if peak > LEFT + WIDE / 2 else "start"
    yield f'<text x="{peak:.1f}" y="{TOP - 8}" text-anchor="{anchor}">peak</text>'


def draw_legend(arena: MemoryLayout) -> Iterator[str]:
    """Yield the kinds with their size at the peak, and the largest tensors then."""
    top = TOP + HIGH + 48
    for index, (kind, words) in enumerate(kind_labels(arena)):
        x, y = LEFT + index % 3 * LEGEND, top + index // 3 * LINE
        yield f'<rect class="m-{kind}" x="{x}" y="{y - 10}" width="12" height="12" rx="2"/>'
        yield f'<text x="{x + 18}" y="{y}">{words}</text>'
    x = LEFT + 3 * LEGEND + 30
    for index, (name, size) in enumerate(arena.alive[:4]):
        yield f'<text x="{x}" y="{top + index * LINE}">{Size(size).text}: {escape_markup(shorten(name, 38))}</text>'


def kind_labels(arena: MemoryLayout) -> Iterator[tuple[Kind, str]]:
    """Yield the kinds in the picture, each with a label that has its size at the peak."""
    present = {life.kind for life in arena.named} | {KINDS[speck.kind] for speck in arena.specks}
    for kind in KINDS:
        if kind in present:
            at_peak = arena.at_peak.get(kind, 0)
            yield kind, WORDS[kind] + (f", {Size(at_peak).text}" if at_peak else "")


# ---- the section of a page --------------------------------------------------


def memory_section(arena: MemoryLayout | None) -> str:
    """Return the map as a section of a page."""
    if arena is None:
        return ""
    left = "".join(
        f'<span style="bottom:{100 * position:.4g}%">{label}</span>'
        for position, label in byte_ticks(arena, 6)
    )
    below = "".join(
        f'<span style="left:{100 * position:.4g}%">{label}</span>' for position, label in call_ticks(arena, 6)
    )
    square = '<svg viewBox="0 0 12 12"><rect class="m-{}" width="12" height="12" rx="2"/></svg>'
    keys = "".join(f"<span>{square.format(kind)}{words}</span>" for kind, words in kind_labels(arena))
    keys += '<span><svg viewBox="0 0 12 12"><path class="m-peak" d="M6 0v12"/></svg>peak</span>'
    alive = "".join(
        f'<tr><td>{escape_markup(name)}</td><td class="n">{Size(size).text}</td></tr>'
        for name, size in arena.alive
    )
    return (
        f'<section><h2>Memory</h2><p class="soft">A batch of the longest rows: {escape_markup(describe(arena))}.</p><figure class="memory">'
        f'<div class="plot"><div class="ys">{left}</div>'
        f'<svg viewBox="0 0 {WIDE} {HIGH}" preserveAspectRatio="none" role="img" aria-label="memory map">'
        f'<rect class="field" width="{WIDE}" height="{HIGH}"/>{"".join(draw_tensors(arena))}</svg><div class="xs">{below}</div></div>'
        f'<div class="keys">{keys}</div><details class="keys"><summary>the largest at the peak</summary>'
        f"<table>{alive}</table></details></figure></section>"
    )
