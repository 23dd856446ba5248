"""The memory map drawn: as a file of its own, and the same picture for a page."""

from collections.abc import Iterator

from llamatrain.config.messages import shorten
from llamatrain.config.units import Size
from llamatrain.engine.lifetimes import KINDS, Kind
from llamatrain.report.format import marked
from llamatrain.report.memory_layout import MemoryLayout
from llamatrain.report.series import ticks

WIDE, HIGH = 1200, 600  # of the picture, in its own units
LEFT, TOP, RIGHT, BOTTOM = 84, 92, 24, 132  # around it, in a file of its own
LEGEND, LINE = 285, 18
APART = 5  # of the same units: smaller ones have no edges of their own
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


def colours(of: tuple[str, ...]) -> str:
    return " ".join(f".m-{kind} {{ fill: {colour} }}" for kind, colour in zip(KINDS, of, strict=True))


STYLE = f"""
text {{ font: 13px {FACES}; fill: #5b6470 }}
.strong {{ font-size: 17px; font-weight: 600; fill: #1d2530 }}
.page {{ fill: #ffffff }}
.field {{ fill: #f3f5f8 }}
.grid {{ stroke: #d5dae1 }}
.m-peak {{ stroke: #c2255c; stroke-width: 1.5; stroke-dasharray: 5 4 }}
.apart {{ stroke: #ffffff; stroke-width: 0.6; vector-effect: non-scaling-stroke }}
{colours(LIGHT)}
@media (prefers-color-scheme: dark) {{
  text {{ fill: #9aa4b2 }}
  .strong {{ fill: #eef1f5 }}
  .page {{ fill: #14181f }}
  .field {{ fill: #1b212a }}
  .grid {{ stroke: #39424f }}
  .m-peak {{ stroke: #ff7aa8 }}
  .apart {{ stroke: #14181f }}
  {colours(DARK)}
}}
"""


def picture(arena: MemoryLayout, title: str) -> str:
    """A file of its own."""
    width, height = LEFT + WIDE + RIGHT, TOP + HIGH + BOTTOM
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">'
    parts = [
        head,
        f"<title>{marked(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{width}" height="{height}" rx="8"/>',
        f'<text class="strong" x="{LEFT}" y="36">{marked(title)}</text>',
        f'<text x="{LEFT}" y="60">{marked(told(arena))}</text>',
        *axes(arena),
        f'<g transform="translate({LEFT} {TOP})"><rect class="field" width="{WIDE}" height="{HIGH}"/>',
        *body(arena),
        "</g>",
        *legend(arena),
        "</svg>\n",
    ]
    return "\n".join(parts)


def told(arena: MemoryLayout) -> str:
    size = Size(arena.size).text
    return f"{arena.calls:,} calls in an arena of {size}; it is fullest at call {arena.peak + 1:,}, {arena.peak_name}"


def body(arena: MemoryLayout) -> Iterator[str]:
    """All that lies in the arena, and the peak, on WIDE times HIGH."""
    columns, rows = arena.grid
    across, up = WIDE / columns, HIGH / rows
    for number, kind in enumerate(KINDS):
        if cells := [speck for speck in arena.specks if speck.kind == number]:
            steps = "".join(
                f"M{c.x * across:.4g} {HIGH - (c.y + c.height) * up:.4g}h{c.width * across:.4g}v{c.height * up:.4g}"
                f"h-{c.width * across:.4g}z"
                for c in cells
            )
            yield f'<path class="m-{kind}" d="{steps}"/>'
    for life in arena.named:
        x, end = life.first / arena.calls * WIDE, (life.last + 1) / arena.calls * WIDE
        y, high = HIGH - (life.offset + life.size) / arena.size * HIGH, life.size / arena.size * HIGH
        apart = " apart" if min(end - x, high) > APART else ""
        calls = (
            f"call {life.first + 1:,}"
            if life.first == life.last
            else f"calls {life.first + 1:,} to {life.last + 1:,}"
        )
        yield (
            f'<rect class="m-{life.kind}{apart}" x="{x:.2f}" y="{y:.2f}" width="{end - x:.2f}" height="{high:.2f}">'
            f"<title>{marked(life.name)}: {Size(life.size).text}, {calls}</title></rect>"
        )
    x = (arena.peak + 0.5) / arena.calls * WIDE
    yield f'<line class="m-peak" x1="{x:.2f}" y1="0" x2="{x:.2f}" y2="{HIGH}" vector-effect="non-scaling-stroke"/>'


def bytes_at(arena: MemoryLayout, count: int) -> list[tuple[float, str]]:
    """Round places on the axis of addresses, in one unit."""
    scale, unit = next((each for each in UNITS if arena.size >= each[0]), UNITS[-1])
    return [
        (place * scale / arena.size, f"{label} {unit}")
        for place, label in ticks(0.0, arena.size / scale, count)
    ]


def calls_at(arena: MemoryLayout, count: int) -> list[tuple[float, str]]:
    return [
        (place / arena.calls, label)
        for place, label in ticks(0.0, float(max(arena.calls, 1)), count, whole=True)
    ]


def axes(arena: MemoryLayout) -> Iterator[str]:
    bottom = TOP + HIGH
    for place, label in bytes_at(arena, 6):
        y = bottom - place * HIGH
        yield f'<line class="grid" x1="{LEFT - 5}" y1="{y:.1f}" x2="{LEFT}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 9}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    for place, label in calls_at(arena, 8):
        x = LEFT + place * WIDE
        yield f'<line class="grid" x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 5}"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{label}</text>'
    peak = LEFT + (arena.peak + 0.5) / arena.calls * WIDE
    anchor = "end" if peak > LEFT + WIDE / 2 else "start"
    yield f'<text x="{peak:.1f}" y="{TOP - 8}" text-anchor="{anchor}">peak</text>'


def legend(arena: MemoryLayout) -> Iterator[str]:
    """The kinds with what they take at the peak, and the largest that are there then."""
    top = TOP + HIGH + 48
    for place, (kind, words) in enumerate(kinds_of(arena)):
        x, y = LEFT + place % 3 * LEGEND, top + place // 3 * LINE
        yield f'<rect class="m-{kind}" x="{x}" y="{y - 10}" width="12" height="12" rx="2"/>'
        yield f'<text x="{x + 18}" y="{y}">{words}</text>'
    x = LEFT + 3 * LEGEND + 30
    for place, (name, size) in enumerate(arena.alive[:4]):
        yield f'<text x="{x}" y="{top + place * LINE}">{Size(size).text}: {marked(shorten(name, 38))}</text>'


def kinds_of(arena: MemoryLayout) -> Iterator[tuple[Kind, str]]:
    """Those that are in the picture, and in words what they take at the peak."""
    there = {life.kind for life in arena.named} | {KINDS[speck.kind] for speck in arena.specks}
    for kind in KINDS:
        if kind in there:
            at_peak = arena.at_peak.get(kind, 0)
            yield kind, WORDS[kind] + (f", {Size(at_peak).text}" if at_peak else "")


# ---- the section of a page --------------------------------------------------


def memory_map(arena: MemoryLayout | None) -> str:
    if arena is None:
        return ""
    left = "".join(f'<span style="bottom:{100 * at:.4g}%">{label}</span>' for at, label in bytes_at(arena, 6))
    below = "".join(f'<span style="left:{100 * at:.4g}%">{label}</span>' for at, label in calls_at(arena, 6))
    square = '<svg viewBox="0 0 12 12"><rect class="m-{}" width="12" height="12" rx="2"/></svg>'
    keys = "".join(f"<span>{square.format(kind)}{words}</span>" for kind, words in kinds_of(arena))
    keys += '<span><svg viewBox="0 0 12 12"><path class="m-peak" d="M6 0v12"/></svg>peak</span>'
    alive = "".join(
        f'<tr><td>{marked(name)}</td><td class="n">{Size(size).text}</td></tr>' for name, size in arena.alive
    )
    return (
        f'<section><h2>Memory</h2><p class="soft">A batch of the longest rows: {marked(told(arena))}.</p><figure class="memory">'
        f'<div class="plot"><div class="ys">{left}</div>'
        f'<svg viewBox="0 0 {WIDE} {HIGH}" preserveAspectRatio="none" role="img" aria-label="memory map">'
        f'<rect class="field" width="{WIDE}" height="{HIGH}"/>{"".join(body(arena))}</svg><div class="xs">{below}</div></div>'
        f'<div class="keys">{keys}</div><details class="keys"><summary>the largest at the peak</summary>'
        f"<table>{alive}</table></details></figure></section>"
    )
