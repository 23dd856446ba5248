"""The names of the files of a run, and which of them a folder contains."""

import os
import re
from contextlib import suppress
from pathlib import Path

from llamatrain.errors import FileError
from llamatrain.gguf.reader import open_gguf

LATEST, BEST, BEST_STEM = "checkpoint-LATEST.gguf", "best.gguf", "best"
NUMBERED = re.compile(r"checkpoint-(0|[1-9][0-9]{0,18})\.gguf")
RESULTS = (
    "config.toml",
    "metrics.jsonl",
    "metrics.csv",
    "loggers.json",
    "loss.svg",
    "report.html",
    "report.json",
    "samples.jsonl",
    "evaluations.jsonl",
    "trace.json",
    "model.gguf",
    "adapter.gguf",
    BEST,
)
NUMBERED_RESULT = re.compile(r"(model|adapter|best)-(0|[1-9][0-9]{0,18})\.gguf")
TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}\.tmp")


def list_files(folder: Path) -> list[Path]:
    """Return all entries that are not folders; links to folders count as files."""
    with os.scandir(folder) as entries:
        return [folder / entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)]


def numbered_checkpoints(folder: Path) -> dict[int, Path]:
    """Return the numbered checkpoints by step."""
    matches = ((NUMBERED.fullmatch(file.name), file) for file in list_files(folder))
    return {int(match[1]): file for match, file in matches if match}


def numbered_results(folder: Path, stem: str) -> dict[int, Path]:
    """Return the results of earlier steps by step, in order; `stem` is "model", "adapter" or "best"."""
    matches = ((NUMBERED_RESULT.fullmatch(file.name), file) for file in list_files(folder))
    return dict(sorted((int(match[2]), file) for match, file in matches if match and match[1] == stem))


def best_filename(step: int) -> str:
    """Return the file name of the result of a best validation; `best.gguf` links to the latest of them."""
    return f"{BEST_STEM}-{step}.gguf"


def checkpoints_newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints by step, newest first.

    LATEST is listed only if it is not a link to one of the others, as after copying a folder.
    """
    checkpoints = sorted(numbered_checkpoints(folder).items(), reverse=True)
    latest = folder / LATEST
    if not latest.exists() or any(is_same_file(latest, file) for _, file in checkpoints):
        return [file for _, file in checkpoints]
    try:
        step = open_gguf(latest).get_value("training.iteration_count", int)
    except FileError:
        step = -1
    return [file for _, file in sorted([*checkpoints, (step, latest)], key=lambda entry: -entry[0])]


def is_same_file(one: Path, other: Path) -> bool:
    """Return True if both paths are the same file; a broken link is none."""
    with suppress(OSError):
        return one.samefile(other)
    return False


def is_temporary(name: str) -> bool:
    """Return True for a temporary file that a killed run left."""
    match = TEMPORARY.fullmatch(name)
    return match is not None and is_run_file(match[1])


def is_run_file(name: str) -> bool:
    """Return True for any file that a run writes."""
    return is_result(name) or name == LATEST or NUMBERED.fullmatch(name) is not None


def is_result(name: str) -> bool:
    """Return True for a file of a run that is no checkpoint."""
    return name in RESULTS or NUMBERED_RESULT.fullmatch(name) is not None


def run_files(folder: Path) -> list[Path]:
    """Return the files of a run in a folder."""
    return [file for file in list_files(folder) if is_run_file(file.name)]


def has_saved(folder: Path) -> bool:
    """Return True if a run has saved a checkpoint or a result here."""
    return any(file.suffix == ".gguf" for file in run_files(folder))


def can_resume(folder: Path) -> bool:
    """Return True if there is a checkpoint."""
    return any(not is_result(file.name) for file in run_files(folder))
