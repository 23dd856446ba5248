"""Draws the page of a sweep: a table of its runs, and their curves."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llamatrain.report.compare import options_table, run_labels, runs_charts
from llamatrain.report.format import escape_markup, format_loss
from llamatrain.report.html import html_document
from llamatrain.report.html_style import RUNS
from llamatrain.report.run_data import RunData


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """A run in the table of a sweep."""

    values: Mapping[str, str]  # by option
    losses: tuple[float, ...]  # at the end of each round
    error: str
    folder: str


def sweep_page(title: str, steps: Sequence[int], rows: Sequence[SweepRow], runs: Sequence[RunData]) -> str:
    """Return the page; the curves are those of the best runs, as many as have colors of their own."""
    shown = runs[:RUNS]
    head = f'<header><h1>{len(rows)} runs</h1><p class="soft">{escape_markup(title)}</p></header>'
    parts = [head, sweep_table(steps, rows)]
    if shown:
        names, losses = run_labels(shown), [run.figures.losses for run in shown]
        parts += [runs_charts(shown, names, losses), options_table(shown, names)]
    return html_document(f"Sweep {title}", "\n".join(parts))


def sweep_table(steps: Sequence[int], rows: Sequence[SweepRow]) -> str:
    """Return the table of runs: their values, and the validation loss at the end of each round."""
    names = list(dict.fromkeys(name for row in rows for name in row.values))
    head = "".join(f'<th class="n">{escape_markup(name.replace("_", "-"))}</th>' for name in names)
    head += "".join(f'<th class="n">step {step:,}</th>' for step in steps)
    lines = []
    for row in rows:
        cells = [row.values.get(name, "") for name in names]
        cells += loss_cells(steps, row)
        numbers = "".join(f'<td class="n">{escape_markup(cell)}</td>' for cell in cells)
        lines.append(f"<tr><td>{escape_markup(row.folder)}</td>{numbers}</tr>")
    table = f"<table><tr><th>run</th>{head}</tr>{''.join(lines)}</table>"
    return f'<section><div class="card wide">{table}</div></section>'


def loss_cells(steps: Sequence[int], row: SweepRow) -> list[str]:
    """Return the losses of a run by round; a run that ended early has empty cells."""
    cells = [format_loss(loss) if math.isfinite(loss) else "diverged" for loss in row.losses]
    if row.error and len(cells) < len(steps):
        cells.append("failed")
    return cells + [""] * (len(steps) - len(cells))
