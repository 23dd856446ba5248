"""What the files of a run are called, and which of them there are."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llamatrain.errors import FileError
from llamatrain.files.reader import open_gguf

LATEST = "checkpoint-LATEST.gguf"
NUMBERED = re.compile(r"checkpoint-(0|[1-9][0-9]{0,18})\.gguf")
RESULTS = ("config.toml", "metrics.jsonl", "loss.svg", "model.gguf", "adapter.gguf")
TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}\.tmp")


def numbered(folder: Path) -> dict[int, Path]:
    """The checkpoints by their steps."""
    matches = ((NUMBERED.fullmatch(file.name), file) for file in folder.iterdir())
    return {int(match[1]): file for match, file in matches if match}


def newest_first(folder: Path) -> list[Path]:
    """By steps. LATEST is for itself only where it is no second name: links were copied as files, or the others removed."""
    found = sorted(numbered(folder).items(), reverse=True)
    latest = folder / LATEST
    if not latest.exists() or any(latest.samefile(file) for _, file in found):
        return [file for _, file in found]
    try:
        step = open_gguf(latest).value("training.iteration_count", int)
    except FileError:
        step = -1
    return [file for _, file in sorted([*found, (step, latest)], key=lambda each: -each[0])]


def is_temporary(name: str) -> bool:
    """Left by a run that was killed while it wrote."""
    match = TEMPORARY.fullmatch(name)
    return match is not None and is_of_a_run(match[1])


def is_of_a_run(name: str) -> bool:
    return name in (*RESULTS, LATEST) or NUMBERED.fullmatch(name) is not None


def files_of(folder: Path) -> list[Path]:
    return [file for file in folder.iterdir() if is_of_a_run(file.name)]


def has_saved(folder: Path) -> bool:
    """A run, something that it could go on from, or what came of it."""
    return bool(numbered(folder)) or any((folder / name).exists() for name in (LATEST, "model.gguf", "adapter.gguf"))


@contextmanager
def telling(path: Path, problem: str) -> Iterator[None]:
    """Around what is done with folders: what the system answers becomes one line."""
    try:
        yield
    except OSError as error:
        raise FileError(f"{path}: {problem}: {error.strerror}") from error
