"""Pages of runs that are there: asked for by the names of their folders."""

import os
from collections.abc import Sequence
from pathlib import Path

from llamatrain.config.not_found import missing
from llamatrain.errors import FileError
from llamatrain.platform.terminal import log_line
from llamatrain.report.compare import runs_page
from llamatrain.report.html import page
from llamatrain.report.output_file import check_place, put
from llamatrain.report.run_data import METRICS, PAGE, RunData, kept_in

OF_SEVERAL = Path("runs.html")


def drawn(folders: Sequence[Path], out: Path | None) -> tuple[Path, int]:
    """The file that was written, and of how many runs."""
    named = dict[str, Path]()
    for folder in folders:
        check_run(folder)
        named.setdefault(os.path.realpath(folder), folder)
    folders = [*named.values()]
    file = out or (folders[0] / PAGE if len(folders) == 1 else OF_SEVERAL)
    check_place(file)
    runs = [read(folder) for folder in folders]
    put(file, page(runs[0]) if len(runs) == 1 else runs_page(runs))
    return file, len(runs)


def check_run(folder: Path) -> None:
    try:
        if not folder.exists():
            raise missing(folder, "no such folder; the folder of a run is needed")
        if not folder.is_dir():
            home = f", which is {folder.parent}" if (folder.parent / METRICS).is_file() else ""
            raise FileError(f"{folder}: this is a file; the folder of a run is needed{home}")
        if not (folder / METRICS).is_file():
            raise FileError(f"{folder}: no run is in this folder: it has no {METRICS}")
    except OSError as error:
        raise FileError(f"{folder}: cannot be looked into: {error.strerror}") from error


def read(folder: Path) -> RunData:
    kept = kept_in(folder, lambda line: log_line(f"warning: {line}"))
    if not kept.figures.last and not kept.figures.scored:
        raise FileError(f"{folder / METRICS}: no step is in it yet, so there is nothing to draw")
    return kept
