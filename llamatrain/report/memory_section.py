"""The memory map on a page: the same picture, stretched to its width, with its words beside it."""

from llamatrain.config.units import Size
from llamatrain.report.escape import marked
from llamatrain.report.memory_layout import MemoryLayout
from llamatrain.report.memory_map import HIGH, WIDE, body, bytes_at, calls_at, kinds_of, told


def memory_map(arena: MemoryLayout | None) -> str:
    if arena is None:
        return ""
    left = "".join(f'<span style="bottom:{100 * at:.4g}%">{label}</span>' for at, label in bytes_at(arena, 6))
    below = "".join(f'<span style="left:{100 * at:.4g}%">{label}</span>' for at, label in calls_at(arena, 6))
    square = '<svg viewBox="0 0 12 12"><rect class="m-{}" width="12" height="12" rx="2"/></svg>'
    keys = "".join(f"<span>{square.format(kind)}{words}</span>" for kind, words in kinds_of(arena))
    keys += '<span><svg viewBox="0 0 12 12"><path class="m-peak" d="M6 0v12"/></svg>peak</span>'
    alive = "".join(
        f'<tr><td>{marked(name)}</td><td class="n">{Size(size).words}</td></tr>' for name, size in arena.alive
    )
    return (
        f'<section><h2>Memory</h2><p class="soft">A batch of the longest rows: {marked(told(arena))}.</p><figure class="memory">'
        f'<div class="plot"><div class="ys">{left}</div>'
        f'<svg viewBox="0 0 {WIDE} {HIGH}" preserveAspectRatio="none" role="img" aria-label="memory map">'
        f'<rect class="field" width="{WIDE}" height="{HIGH}"/>{"".join(body(arena))}</svg><div class="xs">{below}</div></div>'
        f'<div class="keys">{keys}</div><details class="keys"><summary>the largest at the peak</summary>'
        f"<table>{alive}</table></details></figure></section>"
    )
