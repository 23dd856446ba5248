"""`llamatrain report`: draws the page of a run again, or compares several runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from llamatrain.cli.typer_app import Command, make_app, parse_path, with_options
from llamatrain.config.options import Option, Options, build
from llamatrain.platform.terminal import log_line

command = make_app()


@dataclass(frozen=True)
class ReportOptions(Options, panel="The page"):
    """Options of `report`."""

    out: Annotated[
        Path | None,
        Option(
            "File to write; default: report.html in the run's folder, or runs.html here for several runs.",
            unit="FILE",
        ),
    ] = None


@command.command(cls=Command)
@with_options(ReportOptions)
def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="The folder of a run.")], **overrides: Any
) -> None:
    """Draw the page of a run again: curves, samples, memory, profile, options and files, in one file for any browser.

    Several runs are compared: their curves, a table, and the options that differ. Nothing of a run is changed.
    A run that is still training may be drawn.
    """
    from llamatrain.report.render import draw_runs

    file, count = draw_runs([parse_path(run) for run in runs], build(ReportOptions, overrides).out)
    log_line(f"{file}: {'the page of the run' if count == 1 else f'{count} runs in one page'}")
