"""A run as a page that needs nothing else: no network, no script, light and dark."""

from collections.abc import Iterator, Sequence
from datetime import datetime

import llamatrain
from llamatrain.config.units import Size
from llamatrain.report.format import amount, duration, marked, time_of_step
from llamatrain.report.html_chart import SIDE, Curve, PlotArea, chart
from llamatrain.report.html_style import STYLE
from llamatrain.report.memory_map import memory_map
from llamatrain.report.run_data import Profile, RunData, ShownSample
from llamatrain.report.series import Losses, RunSeries, Series, bounds

HEAD = "<!doctype html>\n<!-- llamatrain -->"
ALONE = "default-src 'none'; style-src 'unsafe-inline'"  # what a browser may do with it
OPEN = 3  # samples that are seen at once
SMALL = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens a second",
    "margin": "margin of rewards",
}

NOISY = ("grad_norm", "tokens_per_second", "margin")


def page(kept: RunData) -> str:
    """Of one run."""
    sections = (
        standing(kept),
        curves(kept.figures),
        samples(kept.samples),
        memory_map(kept.arena),
        profile(kept.profile),
        options(kept.options),
        files(kept),
    )
    return framed(kept.name, "\n".join(sections))


def framed(title: str, body: str) -> str:
    when = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M")
    return (
        f'{HEAD}\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{marked(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{ALONE}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{STYLE}</style>\n</head>\n'
        f"<body>\n<main>\n{body}\n<footer>Drawn {when} by llamatrain {llamatrain.__version__}.</footer>\n"
        "</main>\n</body>\n</html>\n"
    )


def section(title: str, body: str, told: str = "") -> str:
    under = f'<p class="soft">{told}</p>' if told else ""
    return f"<section><h2>{title}</h2>{under}{body}</section>" if body else ""


# ---- where it stands -------------------------------------------------------


def standing(kept: RunData) -> str:
    figures, iters = kept.figures, kept.iters
    step, whole = figures.step, max(iters or 0, figures.step, 1)
    tiles = "".join(
        f"<div><span>{name}</span><b>{value}</b><span>{more}</span></div>"
        for name, value, more in tiles_of(figures, iters)
    )
    facts = "".join(
        f"<div><dt>{marked(name)}</dt><dd>{marked(value)}</dd></div>"
        for name, value in kept.facts
        if name != "folder"
    )
    command = f"llamatrain {marked(kept.command)}" if kept.command else "a run"
    stands = f"ended: {marked(kept.ended)}" if kept.ended else "as of its last save"
    return (
        f'<header><h1>{marked(kept.name)}</h1><p class="soft">{command} · {stands}</p>'
        f'<div class="bar"><i style="width:{100 * step / whole:.4g}%"></i></div></header>'
        f'<div class="tiles">{tiles}</div>'
        + (f'<div class="card"><dl class="facts">{facts}</dl></div>' if facts else "")
    )


def tiles_of(figures: RunSeries, iters: int | None) -> Iterator[tuple[str, str, str]]:
    step, losses = figures.step, figures.losses
    yield "step", f"{step:,}", f"of {iters:,}" if iters else ""
    if len(losses.smooth):
        last = figures.told("loss")
        yield (
            "training loss",
            amount(losses.smooth.values[-1]),
            "smoothed" + (f"; the last {amount(last)}" if last is not None else ""),
        )
    if len(losses.validation):
        errors = figures.series("val_loss_error")
        error = (
            f"± {errors.values[-1]:.2g}; "
            if len(errors) and errors.steps[-1] == losses.validation.steps[-1]
            else ""
        )
        best = losses.best
        told = f"{error}best {amount(best.values[0])} at step {best.steps[0]:,.0f}"
        yield "validation loss", amount(losses.validation.values[-1]), told
    accuracy = figures.series("val_accuracy")
    if len(accuracy):
        yield "accuracy", f"{100 * accuracy.values[-1]:.1f} %", "of the validation"
    if (speed := figures.told("tokens_per_second")) is not None:
        tokens = figures.told("tokens")
        yield "tokens a second", f"{speed:,.0f}", f"{tokens:,.0f} so far" if tokens is not None else ""
    taken, each = figures.told("total_seconds"), figures.seconds
    if taken is not None:
        yield "time of all steps", duration(taken), f"{time_of_step(each)} a step" if each is not None else ""
    if iters and step < iters and each is not None:
        yield "time left", duration((iters - step) * each), f"for {iters - step:,} steps"


# ---- curves ----------------------------------------------------------------


def loss_lines(losses: Losses, figures: RunSeries) -> list[Curve]:
    errors = figures.series("val_loss_error")
    told = errors if len(errors) else None
    return [
        Curve(series=losses.training, kind="training noise"),
        Curve(series=losses.smooth, kind="training"),
        Curve(series=losses.validation, kind="validation", dotted=True, errors=told, best=losses.best),
    ]


def curves(figures: RunSeries) -> str:
    losses = figures.losses
    if not len(losses.training) + len(losses.validation):
        return '<section><p class="card soft">no losses yet</p></section>'
    lines = loss_lines(losses, figures)
    keys = '<i class="key training"></i>training, smoothed'
    if len(losses.validation):
        keys += ' &nbsp; <i class="key validation"></i>validation' + (
            " with its standard error" if lines[2].errors else ""
        )
    axes = PlotArea.around(lines, (losses.low, losses.high))
    small = "".join(small_chart(title, figures.series(name), name in NOISY) for name, title in SMALL.items())
    return f'<section>{chart("loss", keys, lines, axes, "large")}<div class="charts">{small}</div></section>'


def small_chart(title: str, series: Series, noisy: bool) -> str:
    """What jumps from step to step has a smooth line through it."""
    if not len(series):
        return ""
    value, low, high = float(series.values[-1]), *bounds(series.values)
    lines = [Curve(series=series.smoothed(low, high) if noisy else series, kind="training")]
    lines = [Curve(series=series, kind="training noise"), *lines] if noisy else lines
    told = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return chart(title, told, lines, PlotArea.around(lines, (low, high)))


# ---- samples ---------------------------------------------------------------


def samples(found: Sequence[ShownSample]) -> str:
    """The last ones first; those before at a click."""
    shown = [sample_of(each) for each in reversed(found)]
    more = (
        f"<details><summary>{len(shown) - OPEN:,} before these</summary>{''.join(shown[OPEN:])}</details>"
        if shown[OPEN:]
        else ""
    )
    return section("Samples", f'<div class="card">{"".join(shown[:OPEN])}{more}</div>' if shown else "")


def sample_of(sample: ShownSample) -> str:
    drawn = f"<pre>{marked(sample.text, lines=True)}</pre>" if sample.waves is None else waves(*sample.waves)
    return f'<div class="sample"><span class="soft">step {sample.step:,}</span>{drawn}</div>'


def waves(target: Sequence[float], model: Sequence[float]) -> str:
    def line(heights: Sequence[float], kind: str) -> str:
        apart = SIDE / max(len(heights) - 1, 1)
        known = ((n * apart, max(-1.5, min(each, 1.5))) for n, each in enumerate(heights) if each == each)
        points = " ".join(f"{x:.1f},{SIDE / 2 * (1 - y):.1f}" for x, y in known)
        return f'<polyline class="{kind}" points="{points}"/>'

    size = f'viewBox="0 0 {SIDE} {SIDE}" preserveAspectRatio="none"'
    return f'<svg {size} role="img" aria-label="wave">{line(target, "training target")}{line(model, "validation")}</svg>'


# ---- the rest --------------------------------------------------------------


def profile(found: Profile | None) -> str:
    if found is None:
        return ""
    whole = sum(seconds for _, seconds in found.ops.values())
    rows = "".join(
        f'<tr><td>{marked(op)}</td><td>{marked(part)}</td><td class="n">{calls:,}</td><td class="n">{1e3 * seconds:,.2f}</td>'
        f'<td class="n">{100 * seconds / whole if whole else 0:.1f} %</td></tr>'
        for (op, part), (calls, seconds) in found.ops.items()
    )
    head = '<tr><th>op</th><th>part</th><th class="n">calls</th><th class="n">ms</th><th class="n">share</th></tr>'
    phases = " · ".join(
        f"{marked(name)} {seconds:.2f} s" for name, seconds in found.phases.items() if seconds >= 0.005
    )
    told = ". ".join(
        filter(
            None,
            (
                f"Of {marked(found.holds.partition(',')[0])}" if found.holds else "",
                f"Before the first step: {phases}" if phases else "",
            ),
        )
    )
    return section("Profile", f'<div class="card wide"><table>{head}{rows}</table></div>', told)


def options(found: dict[str, object]) -> str:
    rows = "".join(
        f"<div><dt>{marked(name)}</dt><dd>{marked(worded(value))}</dd></div>"
        for name, value in found.items()
        if value not in ("", [])
    )
    return section(
        "Options",
        f'<div class="card"><dl class="two">{rows}</dl></div>' if rows else "",
        "as they were resolved",
    )


def worded(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return ", ".join(map(worded, value[:20])) + (" ..." if len(value) > 20 else "")
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 300 else f"{text[:300]}..."


def files(kept: RunData) -> str:
    rows = "".join(
        f'<tr><td>{marked(name)}</td><td class="n">{Size(size).text}</td></tr>' for name, size in kept.files
    )
    return section(
        "Files", f'<div class="card"><table>{rows}</table></div>' if rows else "", marked(kept.folder)
    )
