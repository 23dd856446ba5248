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
KEPT = re.compile(r"(model|adapter|best)-(0|[1-9][0-9]{0,18})\.gguf")
TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}\.tmp")


def files_in(folder: Path) -> list[Path]:
    """All that is no folder: links to folders, too, which are never entered."""
    with os.scandir(folder) as found:
        return [folder / each.name for each in found if not each.is_dir(follow_symlinks=False)]


def numbered(folder: Path) -> dict[int, Path]:
    """The checkpoints by their steps."""
    matches = ((NUMBERED.fullmatch(file.name), file) for file in files_in(folder))
    return {int(match[1]): file for match, file in matches if match}


def results_in(folder: Path, stem: str) -> dict[int, Path]:
    """What came of earlier steps and was kept, by those."""
    matches = ((KEPT.fullmatch(file.name), file) for file in files_in(folder))
    return dict(sorted((int(match[2]), file) for match, file in matches if match and match[1] == stem))


def best_of(step: int) -> str:
    """What was made at the step of the best validation; `best.gguf` is another name of it."""
    return f"{BEST_STEM}-{step}.gguf"


def newest_first(folder: Path) -> list[Path]:
    """By steps. LATEST is for itself only where it is no second name: links were copied as files, or the others removed."""
    found = sorted(numbered(folder).items(), reverse=True)
    latest = folder / LATEST
    if not latest.exists() or any(same(latest, file) for _, file in found):
        return [file for _, file in found]
    try:
        step = open_gguf(latest).get_value("training.iteration_count", int)
    except FileError:
        step = -1
    return [file for _, file in sorted([*found, (step, latest)], key=lambda each: -each[0])]


def same(one: Path, other: Path) -> bool:
    """Whether both are names of one file; a link that leads nowhere is none."""
    with suppress(OSError):
        return one.samefile(other)
    return False


def is_temporary(name: str) -> bool:
    """Left by a run that was killed while it wrote."""
    match = TEMPORARY.fullmatch(name)
    return match is not None and is_of_a_run(match[1])


def is_of_a_run(name: str) -> bool:
    return is_result(name) or name == LATEST or NUMBERED.fullmatch(name) is not None


def is_result(name: str) -> bool:
    """Of a run, and nothing that it could go on from."""
    return name in RESULTS or KEPT.fullmatch(name) is not None


def files_of(folder: Path) -> list[Path]:
    return [file for file in files_in(folder) if is_of_a_run(file.name)]


def has_saved(folder: Path) -> bool:
    """A run, something that it could go on from, or what came of it."""
    return any(file.suffix == ".gguf" for file in files_of(folder))


def can_go_on(folder: Path) -> bool:
    return any(not is_result(file.name) for file in files_of(folder))


@contextmanager
def telling(path: Path, problem: str) -> Iterator[None]:
    """Around what is done with folders: what the system answers becomes one line."""
    try:
        yield
    except OSError as error:
        raise FileError(f"{path}: {problem}: {error.strerror}") from error
