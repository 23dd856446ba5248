"""Draws runs and sweeps for notebooks of Jupyter."""

import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llamatrain.platform.notebook import NotebookArea, bar_html
from llamatrain.report.format import Pace, escape_markup, format_duration, format_loss
from llamatrain.report.run_data import read_run_data
from llamatrain.report.series import Losses, Points, Series, is_drawn, to_number
from llamatrain.report.svg_plot import draw_svg

CURVES = ("loss", "val_loss", "retain_loss")


class NotebookProgress:
    """Shows the progress and the losses of a run below its cell; it is called with each line of metrics."""

    def __init__(self, title: str, iters: int | None, now: float) -> None:
        self._title, self._iters, self._start = title, iters, now
        self._points = {name: Points() for name in CURVES}
        self._area, self._pace = NotebookArea(), Pace()
        self._text, self._step = "", 0

    def add(self, line: Mapping[str, Any], now: float) -> None:
        """Record a line, and draw if the last drawing is old."""
        self._step = int(line["step"])
        for name in CURVES:
            if is_drawn(name, line):
                self._points[name].add(self._step, to_number(line[name], 1e300))
        if "loss" in line:
            self._pace.mark(now, self._step)
            self._text = self._describe(line, now)
        if self._area.is_due or self._step == self._iters:
            self._area.show(self._html())

    def _describe(self, line: Mapping[str, Any], now: float) -> str:
        """Return the numbers of a step in one line."""
        whole = f" of {self._iters:,}" if self._iters is not None else ""
        parts = [f"step {self._step:,}{whole}", f"loss {format_loss(to_number(line['loss'], 1e300))}"]
        if isinstance(speed := line.get("tokens_per_second"), int | float) and math.isfinite(speed):
            parts.append(f"{speed:,.0f} tok/s")
        parts.append(format_duration(now - self._start))
        left = self._pace.seconds_left(now, self._iters) if self._iters is not None else None
        if left is not None:
            parts.append(f"{format_duration(left)} left")
        return ", ".join(parts)

    def _html(self) -> str:
        series = (Series.from_points(*self._points[name].columns) for name in CURVES)
        return bar_html(self._text, self._step, self._iters) + picture(
            draw_svg(Losses.from_series(*series), self._title)
        )


def picture(svg: str) -> str:
    """Return a picture as an image, in which its styles stay apart from those of the page."""
    data = b64encode(svg.encode()).decode()
    return f'<div><img alt="the losses of the run" src="data:image/svg+xml;base64,{data}"></div>'


def run_html(folder: Path, facts: Sequence[tuple[str, str]]) -> str:
    """Return a run as HTML: facts and curves; a folder that is gone has no curves."""
    curves = ""
    if folder.is_dir():
        curves = picture(draw_svg(read_run_data(folder, lambda line: None).figures.losses, str(folder)))
    return facts_html(facts) + curves


def facts_html(facts: Sequence[tuple[str, str]]) -> str:
    """Return facts as a table of names and values."""
    rows = (
        f"<tr><th>{escape_markup(name)}</th><td>{escape_markup(value)}</td></tr>" for name, value in facts
    )
    return f"<table>{''.join(rows)}</table>"


def table_html(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with a line of titles."""
    titles = "".join(f"<th>{escape_markup(title)}</th>" for title in head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape_markup(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{titles}</tr>{lines}</table>"
