"""Several runs over each other, in one page."""

from collections import Counter
from collections.abc import Sequence

from llamatrain.report.format import amount, duration, marked
from llamatrain.report.html import NOISY, SMALL, framed, section, worded
from llamatrain.report.html_chart import Curve, PlotArea, chart
from llamatrain.report.html_style import RUNS
from llamatrain.report.run_data import RunData
from llamatrain.report.series import Losses, bounds


def runs_page(runs: Sequence[RunData]) -> str:
    names = names_of(runs)
    head = f'<header><h1>{len(runs)} runs</h1><p class="soft">{marked(", ".join(names))}</p></header>'
    losses = [run.figures.losses for run in runs]
    return framed(
        f"{len(runs)} runs",
        "\n".join((head, table(runs, names, losses), curves(runs, names, losses), differences(runs, names))),
    )


def names_of(runs: Sequence[RunData]) -> list[str]:
    """Folders of one name are called by their paths."""
    twice = Counter(run.name for run in runs)
    return [run.name if twice[run.name] == 1 else str(run.folder) for run in runs]


def key(number: int) -> str:
    return f'<i class="key c{number % RUNS}"></i>'


def table(runs: Sequence[RunData], names: Sequence[str], losses: Sequence[Losses]) -> str:
    rows = []
    for number, (run, name, each) in enumerate(zip(runs, names, losses, strict=True)):
        speed, taken = run.figures.told("tokens_per_second"), run.figures.told("total_seconds")
        cells = (
            f"{run.figures.step:,}",
            amount(each.smooth.values[-1]) if len(each.smooth) else "",
            amount(each.validation.values[-1]) if len(each.validation) else "",
            f"{amount(each.best.values[0])} at {each.best.steps[0]:,.0f}" if len(each.best) else "",
            f"{speed:,.0f}" if speed is not None else "",
            duration(taken) if taken is not None else "",
        )
        numbers = "".join(f'<td class="n">{cell}</td>' for cell in cells)
        rows.append(f"<tr><td>{key(number)}{marked(name)}</td>{numbers}</tr>")
    titles = ("steps", "training loss", "validation", "best validation", "tokens a second", "time of steps")
    head = "".join(f'<th class="n">{title}</th>' for title in titles)
    return f'<section><div class="card wide"><table><tr><th>run</th>{head}</tr>{"".join(rows)}</table></div></section>'


def curves(runs: Sequence[RunData], names: Sequence[str], losses: Sequence[Losses]) -> str:
    keys = " &nbsp; ".join(f"{key(number)}{marked(name)}" for number, name in enumerate(names))
    trained = [Curve(series=each.smooth, kind=f"c{n % RUNS}") for n, each in enumerate(losses)]
    judged = [
        Curve(series=each.validation, kind=f"c{n % RUNS}", dotted=True, best=each.best)
        for n, each in enumerate(losses)
    ]
    large = over("training loss, smoothed", keys, trained, "large") + over(
        "validation loss", keys, judged, "large"
    )
    small = ""
    for name, title in SMALL.items():
        found = [run.figures.series(name) for run in runs]
        every = [each.smoothed(*bounds(each.values)) for each in found] if name in NOISY else found
        small += over(
            title,
            "",
            [Curve(series=series, kind=f"c{n % RUNS}") for n, series in enumerate(every)],
        )
    return f'<section class="stack">{large}<div class="charts">{small}</div></section>'


def over(title: str, told: str, lines: Sequence[Curve], size: str = "") -> str:
    return (
        chart(title, told, lines, PlotArea.around(lines), size)
        if any(len(line.series) for line in lines)
        else ""
    )


def differences(runs: Sequence[RunData], names: Sequence[str]) -> str:
    """The options that not all of them have alike."""
    found = list(dict.fromkeys(name for run in runs for name in run.options))
    rows = ""
    for option in found:
        values = [worded(run.options[option]) if option in run.options else "" for run in runs]
        if len(set(values)) > 1:
            rows += f"<tr><td>{marked(option)}</td>{''.join(f'<td>{marked(value)}</td>' for value in values)}</tr>"
    head = "".join(f"<th>{key(number)}{marked(name)}</th>" for number, name in enumerate(names))
    drawn = (
        f'<div class="card wide"><table><tr><th>option</th>{head}</tr>{rows}</table></div>' if rows else ""
    )
    return section("Options", drawn, "those that differ")
