"""What the files of a run are called, and which of them there are."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
    "trace.json",
    "model.gguf",
    "adapter.gguf",
    BEST,
)
NUMBERED_RESULT = re.compile(r"(model|adapter|best)-(0|[1-9][0-9]{0,18})\.gguf")
TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}\.tmp")


def list_files(folder: Path) -> list[Path]:
    """All that is no folder: links to folders, too, which are never entered."""
    with os.scandir(folder) as entries:
        return [folder / entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)]


def numbered_checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints by their steps."""
    matches = ((NUMBERED.fullmatch(file.name), file) for file in list_files(folder))
    return {int(match[1]): file for match, file in matches if match}


def numbered_results(folder: Path, stem: str) -> dict[int, Path]:
    """What came of earlier steps and was kept, by those."""
    matches = ((NUMBERED_RESULT.fullmatch(file.name), file) for file in list_files(folder))
    return dict(sorted((int(match[2]), file) for match, file in matches if match and match[1] == stem))


def best_filename(step: int) -> str:
    """What was made at the step of the best validation; `best.gguf` is another name of it."""
    return f"{BEST_STEM}-{step}.gguf"


def checkpoints_newest_first(folder: Path) -> list[Path]:
    """By steps. LATEST is for itself only where it is no second name: links were copied as files, or the others removed."""
    checkpoints = sorted(numbered_checkpoints(folder).items(), reverse=True)
    latest = folder / LATEST
    if not latest.exists() or any(is_same_file(latest, file) for _, file in checkpoints):
        return [file for _, file in checkpoints]
    try:
        step = open_gguf(latest).get_value("training.iteration_count", int)
    except FileError:
        step = -1
    return [file for _, file in sorted([*checkpoints, (step, latest)], key=lambda each: -each[0])]


def is_same_file(one: Path, other: Path) -> bool:
    """Whether both are names of one file; a link that leads nowhere is none."""
    with suppress(OSError):
        return one.samefile(other)
    return False


def is_temporary(name: str) -> bool:
    """Left by a run that was killed while it wrote."""
    match = TEMPORARY.fullmatch(name)
    return match is not None and is_run_file(match[1])


def is_run_file(name: str) -> bool:
    return is_result(name) or name == LATEST or NUMBERED.fullmatch(name) is not None


def is_result(name: str) -> bool:
    """Of a run, and nothing that it could go on from."""
    return name in RESULTS or NUMBERED_RESULT.fullmatch(name) is not None


def run_files(folder: Path) -> list[Path]:
    return [file for file in list_files(folder) if is_run_file(file.name)]


def has_saved(folder: Path) -> bool:
    """A run, something that it could go on from, or what came of it."""
    return any(file.suffix == ".gguf" for file in run_files(folder))


def can_resume(folder: Path) -> bool:
    return any(not is_result(file.name) for file in run_files(folder))


@contextmanager
def wrap_os_errors(path: Path, problem: str) -> Iterator[None]:
    """Around what is done with folders: what the system answers becomes one line."""
    try:
        yield
    except OSError as error:
        raise FileError(f"{path}: {problem}: {error.strerror}") from error
