"""The HTML page of a run, self-contained: no network, no script, light and dark."""

from collections.abc import Iterator, Sequence
from datetime import datetime

import llamatrain
from llamatrain.config.units import Size
from llamatrain.report.evaluation_rows import Row, Value
from llamatrain.report.evaluations import ShownEvaluation
from llamatrain.report.format import escape_markup, format_duration, format_loss, format_step_time
from llamatrain.report.html_chart import SIDE, Curve, PlotArea, chart
from llamatrain.report.html_style import STYLE
from llamatrain.report.memory_map import memory_section
from llamatrain.report.run_data import Profile, RunData, ShownSample
from llamatrain.report.series import Losses, RunSeries, Series, axis_bounds

HEAD = "<!doctype html>\n<!-- llamatrain -->"
CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # the page may load nothing
OPEN_SAMPLES = 3  # samples that are not folded
SMALL_CHARTS = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens a second",
    "margin": "margin of rewards",
    "reward": "reward of answers",
    "val_reward": "validation reward",
    "answer_tokens": "tokens of an answer",
    "kl": "divergence from the base",
    "clipped": "share of tokens that are clipped",
}

NOISY = ("grad_norm", "tokens_per_second", "margin", "reward", "answer_tokens", "kl", "clipped")


def run_page(run: RunData) -> str:
    """Return the page of one run."""
    sections = (
        summary_section(run),
        charts_section(run.figures),
        evaluations_section(run.evaluations),
        samples_section(run.samples),
        memory_section(run.arena),
        profile_section(run.profile),
        options_section(run.options),
        files_section(run),
    )
    return html_document(run.name, "\n".join(sections))


def html_document(title: str, body: str) -> str:
    """Return a complete HTML document."""
    when = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M")
    return (
        f'{HEAD}\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape_markup(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{STYLE}</style>\n</head>\n'
        f"<body>\n<main>\n{body}\n<footer>Drawn {when} by llamatrain {llamatrain.__version__}.</footer>\n"
        "</main>\n</body>\n</html>\n"
    )


def html_section(title: str, body: str, caption: str = "") -> str:
    """Return a section with a title, or nothing if the body is empty."""
    under = f'<p class="soft">{caption}</p>' if caption else ""
    return f"<section><h2>{title}</h2>{under}{body}</section>" if body else ""


# ---- where it stands -------------------------------------------------------


def summary_section(run: RunData) -> str:
    """Return the head of the page: state, progress, main numbers, facts."""
    figures, iters = run.figures, run.iters
    step, total = figures.step, max(iters or 0, figures.step, 1)
    tiles = "".join(
        f"<div><span>{name}</span><b>{value}</b><span>{more}</span></div>"
        for name, value, more in summary_tiles(figures, iters)
    )
    facts = "".join(
        f"<div><dt>{escape_markup(name)}</dt><dd>{escape_markup(value)}</dd></div>"
        for name, value in run.facts
        if name != "folder"
    )
    command = f"llamatrain {escape_markup(run.command)}" if run.command else "a run"
    state = f"ended: {escape_markup(run.ended)}" if run.ended else "as of its last save"
    return (
        f'<header><h1>{escape_markup(run.name)}</h1><p class="soft">{command} · {state}</p>'
        f'<div class="bar"><i style="width:{100 * step / total:.4g}%"></i></div></header>'
        f'<div class="tiles">{tiles}</div>'
        + (f'<div class="card"><dl class="facts">{facts}</dl></div>' if facts else "")
    )


def summary_tiles(figures: RunSeries, iters: int | None) -> Iterator[tuple[str, str, str]]:
    """Yield title, value and detail of the main numbers."""
    step, losses = figures.step, figures.losses
    yield "step", f"{step:,}", f"of {iters:,}" if iters else ""
    if len(losses.smooth):
        last = figures.last_value("loss")
        yield (
            "training loss",
            format_loss(losses.smooth.values[-1]),
            "smoothed" + (f"; the last {format_loss(last)}" if last is not None else ""),
        )
    if len(losses.validation):
        errors = figures.series("val_loss_error")
        error = (
            f"± {errors.values[-1]:.2g}; "
            if len(errors) and errors.steps[-1] == losses.validation.steps[-1]
            else ""
        )
        best = losses.best
        detail = f"{error}best {format_loss(best.values[0])} at step {best.steps[0]:,.0f}"
        yield "validation loss", format_loss(losses.validation.values[-1]), detail
    if len(losses.retained):
        first, last = losses.retained.values[[0, -1]]
        yield (
            "retained loss",
            format_loss(last),
            f"{format_loss(first)} at step {losses.retained.steps[0]:,.0f}",
        )
    accuracy = figures.series("val_accuracy")
    if len(accuracy):
        yield "accuracy", f"{100 * accuracy.values[-1]:.1f} %", "of the validation"
    if (speed := figures.last_value("tokens_per_second")) is not None:
        tokens = figures.last_value("tokens")
        yield "tokens a second", f"{speed:,.0f}", f"{tokens:,.0f} so far" if tokens is not None else ""
    seconds, step_seconds = figures.last_value("total_seconds"), figures.seconds
    if seconds is not None:
        yield (
            "time of all steps",
            format_duration(seconds),
            f"{format_step_time(step_seconds)} a step" if step_seconds is not None else "",
        )
    if iters and step < iters and step_seconds is not None:
        yield "time left", format_duration((iters - step) * step_seconds), f"for {iters - step:,} steps"


# ---- curves ----------------------------------------------------------------


def loss_curves(losses: Losses, figures: RunSeries) -> list[Curve]:
    """Return the curves of the loss chart."""
    spread, retained_spread = (
        errors if len(errors := figures.series(name)) else None
        for name in ("val_loss_error", "retain_loss_error")
    )
    return [
        Curve(series=losses.training, kind="training noise"),
        Curve(series=losses.smooth, kind="training"),
        Curve(series=losses.validation, kind="validation", dotted=True, errors=spread, best=losses.best),
        Curve(series=losses.retained, kind="retained", dotted=True, errors=retained_spread),
    ]


def charts_section(figures: RunSeries) -> str:
    """Return the loss chart and the small charts below it."""
    losses = figures.losses
    if not len(losses.training) + len(losses.validation) + len(losses.retained):
        return '<section><p class="card soft">no losses yet</p></section>'
    lines = loss_curves(losses, figures)
    keys = '<i class="key training"></i>training, smoothed'
    if len(losses.validation):
        keys += ' &nbsp; <i class="key validation"></i>validation' + (
            " with its standard error" if lines[2].errors else ""
        )
    if len(losses.retained):
        keys += ' &nbsp; <i class="key retained"></i>data to retain'
    axes = PlotArea.fit(lines, (losses.low, losses.high))
    small = "".join(
        small_chart(title, figures.series(name), name in NOISY) for name, title in SMALL_CHARTS.items()
    )
    return f'<section>{chart("loss", keys, lines, axes, "large")}<div class="charts">{small}</div></section>'


def small_chart(title: str, series: Series, noisy: bool) -> str:
    """Return a small chart; noisy values get a smoothed line as well."""
    if not len(series):
        return ""
    value, low, high = float(series.values[-1]), *axis_bounds(series.values)
    lines = [Curve(series=series.smooth(low, high) if noisy else series, kind="training")]
    lines = [Curve(series=series, kind="training noise"), *lines] if noisy else lines
    caption = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return chart(title, caption, lines, PlotArea.fit(lines, (low, high)))


# ---- evaluations -----------------------------------------------------------


def evaluations_section(evaluations: Sequence[ShownEvaluation]) -> str:
    """Return the results of evaluations, the last ones first."""
    tables = "".join(
        f'<p class="soft">{escape_markup(evaluation.title)}</p><table>{evaluation_table(evaluation.rows)}</table>'
        for evaluation in reversed(evaluations)
    )
    return html_section("Evaluations", f'<div class="card wide">{tables}</div>' if tables else "")


def evaluation_table(rows: Sequence[Row]) -> str:
    """Return the rows of an evaluation; those of a base, and the change, if there is one."""
    has_base = any(row.base for row in rows)
    columns = [("model", [format_value(row.model) for row in rows])]
    if has_base:
        columns = [("base", [format_value(row.base) for row in rows]), *columns]
        columns.append(("change", [row.change for row in rows]))
    head = "".join(f'<th class="n">{name}</th>' for name, _ in columns)
    lines = zip(rows, *(values for _, values in columns), strict=True)
    body = "".join(
        f"<tr><td>{escape_markup(row.name)}</td>{''.join(map(number_cell, values))}</tr>"
        for row, *values in lines
    )
    return f"<tr><th></th>{head}</tr>{body}"


def number_cell(text: str) -> str:
    """Return a cell with a number."""
    return f'<td class="n">{text}</td>'


def format_value(value: Value | None) -> str:
    """Format a measure with its standard error."""
    return "" if value is None else value.format("±")


# ---- samples ---------------------------------------------------------------


def samples_section(shown_samples: Sequence[ShownSample]) -> str:
    """Return the samples, the last ones first; older ones are folded."""
    shown = [sample_html(sample) for sample in reversed(shown_samples)]
    more = (
        f"<details><summary>{len(shown) - OPEN_SAMPLES:,} before "
        f"these</summary>{''.join(shown[OPEN_SAMPLES:])}</details>"
        if shown[OPEN_SAMPLES:]
        else ""
    )
    return html_section(
        "Samples", f'<div class="card">{"".join(shown[:OPEN_SAMPLES])}{more}</div>' if shown else ""
    )


def sample_html(sample: ShownSample) -> str:
    """Return one sample."""
    body = (
        f"<pre>{escape_markup(sample.text, lines=True)}</pre>"
        if sample.waves is None
        else waves_svg(*sample.waves)
    )
    return f'<div class="sample"><span class="soft">step {sample.step:,}</span>{body}</div>'


def waves_svg(target: Sequence[float], model: Sequence[float]) -> str:
    """Return target and model wave as a picture."""

    def polyline(heights: Sequence[float], kind: str) -> str:
        """Return one wave as a line."""
        spacing = SIDE / max(len(heights) - 1, 1)
        points_of_wave = (
            (n * spacing, max(-1.5, min(height, 1.5))) for n, height in enumerate(heights) if height == height
        )
        points = " ".join(f"{x:.1f},{SIDE / 2 * (1 - y):.1f}" for x, y in points_of_wave)
        return f'<polyline class="{kind}" points="{points}"/>'

    size = f'viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none"'
    return f'<svg {size} role="img" aria-label="wave">{polyline(target, "training target")}{polyline(model, "validation")}</svg>'


# ---- the rest --------------------------------------------------------------


def profile_section(profile: Profile | None) -> str:
    """Return the table of the profile."""
    if profile is None:
        return ""
    total = sum(seconds for _, seconds in profile.ops.values())
    rows = "".join(
        f'<tr><td>{escape_markup(op)}</td><td>{escape_markup(part)}</td><td class="n">{calls:,}</td><td class="n">{1e3 * seconds:,.2f}</td>'
        f'<td class="n">{100 * seconds / total if total else 0:.1f} %</td></tr>'
        for (op, part), (calls, seconds) in profile.ops.items()
    )
    head = '<tr><th>op</th><th>part</th><th class="n">calls</th><th class="n">ms</th><th class="n">share</th></tr>'
    phases = " · ".join(
        f"{escape_markup(name)} {seconds:.2f} s"
        for name, seconds in profile.phases.items()
        if seconds >= 0.005
    )
    caption = ". ".join(
        filter(
            None,
            (
                f"Of {escape_markup(profile.holds.partition(',')[0])}" if profile.holds else "",
                f"Before the first step: {phases}" if phases else "",
            ),
        )
    )
    return html_section("Profile", f'<div class="card wide"><table>{head}{rows}</table></div>', caption)


def options_section(values: dict[str, object]) -> str:
    """Return the resolved options."""
    rows = "".join(
        f"<div><dt>{escape_markup(name)}</dt><dd>{escape_markup(format_option(value))}</dd></div>"
        for name, value in values.items()
        if value not in ("", [])
    )
    return html_section(
        "Options",
        f'<div class="card"><dl class="two">{rows}</dl></div>' if rows else "",
        "as they were resolved",
    )


def format_option(value: object) -> str:
    """Format the value of an option."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return ", ".join(map(format_option, value[:20])) + (" ..." if len(value) > 20 else "")
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 300 else f"{text[:300]}..."


def files_section(run: RunData) -> str:
    """Return the files of the run with their sizes."""
    rows = "".join(
        f'<tr><td>{escape_markup(name)}</td><td class="n">{Size(size).text}</td></tr>'
        for name, size in run.files
    )
    return html_section(
        "Files", f'<div class="card"><table>{rows}</table></div>' if rows else "", escape_markup(run.folder)
    )
