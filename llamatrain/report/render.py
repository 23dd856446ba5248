"""Draws the pages of existing runs, given by their folders."""

import os
from collections.abc import Sequence
from pathlib import Path

from llamatrain.config.not_found import missing_file
from llamatrain.errors import FileError
from llamatrain.platform.terminal import log_line
from llamatrain.report.compare import runs_page
from llamatrain.report.html import run_page
from llamatrain.report.output_file import check_output_file, write_text
from llamatrain.report.run_data import METRICS, PAGE, RunData, read_run_data

COMPARISON = Path("runs.html")


def draw_runs(folders: Sequence[Path], out: Path | None) -> tuple[Path, int]:
    """Draw one or several runs; return the file and the number of runs."""
    unique = dict[str, Path]()
    for folder in folders:
        check_run(folder)
        unique.setdefault(os.path.realpath(folder), folder)
    folders = [*unique.values()]
    file = out or (folders[0] / PAGE if len(folders) == 1 else COMPARISON)
    check_output_file(file)
    runs = [read_run(folder) for folder in folders]
    write_text(file, run_page(runs[0]) if len(runs) == 1 else runs_page(runs))
    return file, len(runs)


def check_run(folder: Path) -> None:
    """Raise if a path is not the folder of a run."""
    try:
        if not folder.exists():
            raise missing_file(folder, "no such folder; give the folder of a run")
        if not folder.is_dir():
            home = f", which is {folder.parent}" if (folder.parent / METRICS).is_file() else ""
            raise FileError(f"{folder}: this is a file; give the folder of a run{home}", code="not-a-run")
        if not (folder / METRICS).is_file():
            raise FileError(f"{folder}: the folder contains no run: {METRICS} is missing", code="not-a-run")
    except OSError as error:
        raise FileError(f"{folder}: cannot be read: {error.strerror}", code="folder-error") from error


def read_run(folder: Path) -> RunData:
    """Read a run, which must have at least one step."""
    run = read_run_data(folder, lambda line: log_line(f"warning: {line}"))
    if not run.figures.last and not run.figures.scored:
        raise FileError(
            f"{folder / METRICS}: nothing to draw: the file contains no step yet", code="no-metrics"
        )
    return run
