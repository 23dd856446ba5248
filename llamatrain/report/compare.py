"""Compares several runs on one HTML page."""

from collections import Counter
from collections.abc import Sequence

from llamatrain.report.format import escape_markup, format_duration, format_loss
from llamatrain.report.html import NOISY, SMALL_CHARTS, format_option, html_document, html_section
from llamatrain.report.html_chart import Curve, PlotArea, chart
from llamatrain.report.html_style import RUNS
from llamatrain.report.run_data import RunData
from llamatrain.report.series import Losses, axis_bounds


def runs_page(runs: Sequence[RunData]) -> str:
    """Return the page that compares runs."""
    names = run_labels(runs)
    head = f'<header><h1>{len(runs)} runs</h1><p class="soft">{escape_markup(", ".join(names))}</p></header>'
    losses = [run.figures.losses for run in runs]
    return html_document(
        f"{len(runs)} runs",
        "\n".join(
            (
                head,
                runs_table(runs, names, losses),
                runs_charts(runs, names, losses),
                options_table(runs, names),
            )
        ),
    )


def run_labels(runs: Sequence[RunData]) -> list[str]:
    """Return a label per run: the folder's name, or its path if the name is not unique."""
    counts = Counter(run.name for run in runs)
    return [run.name if counts[run.name] == 1 else str(run.folder) for run in runs]


def color_key(index: int) -> str:
    """Return the color sample of a run."""
    return f'<i class="key c{index % RUNS}"></i>'


def runs_table(runs: Sequence[RunData], names: Sequence[str], losses: Sequence[Losses]) -> str:
    """Return the table with the final numbers of each run."""
    rows = []
    for index, (run, name, run_losses) in enumerate(zip(runs, names, losses, strict=True)):
        speed, seconds = run.figures.last_value("tokens_per_second"), run.figures.last_value("total_seconds")
        cells = (
            f"{run.figures.step:,}",
            format_loss(run_losses.smooth.values[-1]) if len(run_losses.smooth) else "",
            format_loss(run_losses.validation.values[-1]) if len(run_losses.validation) else "",
            f"{format_loss(run_losses.best.values[0])} at {run_losses.best.steps[0]:,.0f}"
            if len(run_losses.best)
            else "",
            f"{speed:,.0f}" if speed is not None else "",
            format_duration(seconds) if seconds is not None else "",
        )
        numbers = "".join(f'<td class="n">{cell}</td>' for cell in cells)
        rows.append(f"<tr><td>{color_key(index)}{escape_markup(name)}</td>{numbers}</tr>")
    titles = ("steps", "training loss", "validation", "best validation", "tokens a second", "time of steps")
    head = "".join(f'<th class="n">{title}</th>' for title in titles)
    return f'<section><div class="card wide"><table><tr><th>run</th>{head}</tr>{"".join(rows)}</table></div></section>'


def runs_charts(runs: Sequence[RunData], names: Sequence[str], losses: Sequence[Losses]) -> str:
    """Return the charts in which the runs overlay each other."""
    keys = " &nbsp; ".join(f"{color_key(number)}{escape_markup(name)}" for number, name in enumerate(names))
    training = [Curve(series=run_losses.smooth, kind=f"c{n % RUNS}") for n, run_losses in enumerate(losses)]
    validation = [
        Curve(series=run_losses.validation, kind=f"c{n % RUNS}", dotted=True, best=run_losses.best)
        for n, run_losses in enumerate(losses)
    ]
    large = overlay_chart("training loss, smoothed", keys, training, "large") + overlay_chart(
        "validation loss", keys, validation, "large"
    )
    small = ""
    for name, title in SMALL_CHARTS.items():
        all_series = [run.figures.series(name) for run in runs]
        curves = (
            [run_losses.smooth(*axis_bounds(run_losses.values)) for run_losses in all_series]
            if name in NOISY
            else all_series
        )
        small += overlay_chart(
            title,
            "",
            [Curve(series=series, kind=f"c{n % RUNS}") for n, series in enumerate(curves)],
        )
    return f'<section class="stack">{large}<div class="charts">{small}</div></section>'


def overlay_chart(title: str, caption: str, curves: Sequence[Curve], size: str = "") -> str:
    """Return a chart of several curves, or nothing if all are empty."""
    return (
        chart(title, caption, curves, PlotArea.fit(curves), size)
        if any(len(line.series) for line in curves)
        else ""
    )


def options_table(runs: Sequence[RunData], names: Sequence[str]) -> str:
    """Return the table of the options that differ between runs."""
    names_of_options = list(dict.fromkeys(name for run in runs for name in run.options))
    rows = ""
    for option in names_of_options:
        values = [format_option(run.options[option]) if option in run.options else "" for run in runs]
        if len(set(values)) > 1:
            rows += f"<tr><td>{escape_markup(option)}</td>{''.join(f'<td>{escape_markup(value)}</td>' for value in values)}</tr>"
    head = "".join(f"<th>{color_key(number)}{escape_markup(name)}</th>" for number, name in enumerate(names))
    table = (
        f'<div class="card wide"><table><tr><th>option</th>{head}</tr>{rows}</table></div>' if rows else ""
    )
    return html_section("Options", table, "those that differ")
