"""The result of a sweep: records, the table and the page."""

import math
from dataclasses import dataclass
from pathlib import Path

from llamatrain.commands.sweep_state import Sweep
from llamatrain.platform.terminal import log_line
from llamatrain.report.format import format_loss
from llamatrain.report.output_file import write_text
from llamatrain.report.run_data import read_run_data
from llamatrain.report.sweep_page import SweepRow, sweep_page

PAGE = "sweep.html"


@dataclass(frozen=True, kw_only=True)
class SweptRun:
    """A run of a sweep that has ended."""

    folder: Path
    values: dict[str, str]  # by option
    losses: list[float | None]  # of validation, at the end of each round; None: no number
    error: str | None


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """The result of a sweep: its runs, the best first."""

    folder: Path
    best: Path
    steps: list[int]  # at which the rounds ended
    runs: list[SweptRun]

    def _repr_html_(self) -> str:
        """Return the table of the runs for a notebook."""
        from llamatrain.report.notebook import table_html

        names = list(dict.fromkeys(name for run in self.runs for name in run.values))
        rows = [
            [
                *(run.values.get(name, "") for name in names),
                *("diverged" if loss is None else format_loss(loss) for loss in run.losses),
                *[""] * (len(self.steps) - len(run.losses)),
                run.error or str(run.folder),
            ]
            for run in self.runs
        ]
        return table_html([*names, *(f"step {step:,}" for step in self.steps), "run"], rows)


def rows(sweep: Sweep) -> list[SweepRow]:
    """Return the rows of the table, the best run first."""
    return [
        SweepRow(values=trial.values, losses=tuple(trial.losses), error=trial.error, folder=trial.folder)
        for trial in sweep.best
    ]


def draw_page(folder: Path, sweep: Sweep) -> None:
    """Draw the page of a sweep: the table and the curves of all runs."""
    runs = [read_run_data(folder / trial.folder, log_line) for trial in sweep.best if trial.losses]
    drawn = [run for run in runs if run.figures.last or run.figures.scored]
    write_text(folder / PAGE, sweep_page(str(folder), sweep.steps, rows(sweep), drawn))


def result_of(folder: Path, sweep: Sweep) -> SweepResult:
    """Return the result of a sweep that is complete."""
    runs = [
        SweptRun(
            folder=folder / trial.folder,
            values=trial.values,
            losses=[loss if math.isfinite(loss) else None for loss in trial.losses],
            error=trial.error or None,
        )
        for trial in sweep.best
    ]
    return SweepResult(folder=folder, best=runs[0].folder, steps=sweep.steps, runs=runs)
