"""Watches the input files of a run for changes."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from llamatrain.gguf.reader import PART_NAME
from llamatrain.io.mapped_file import FileIdentity, MappedFile, mapped_files
from llamatrain.train.protocols import InputChanged


@dataclass(frozen=True, kw_only=True)
class WatchedFile:
    """An input file as it was when the run started."""

    identity: FileIdentity
    needed_to_resume: bool


def watch_files(paths: Iterable[tuple[Path, bool]]) -> dict[Path, WatchedFile]:
    """Record the identity of input files before they are opened.

    Missing files are reported by their readers.
    """
    return {
        file: WatchedFile(identity=FileIdentity.read(file), needed_to_resume=needed)
        for path, needed in paths
        for file in existing_files(path)
    }


def existing_files(path: Path) -> Iterator[Path]:
    """Yield the files of an input that exist."""
    with suppress(OSError):
        yield from (file for file in files_of_input(path) if file.is_file())


def files_of_input(path: Path) -> Iterator[Path]:
    """Yield all parts of a split model, all files of a folder, or the file itself."""
    part = PART_NAME.fullmatch(path.name)
    if part:
        names = (PART_NAME.fullmatch(file.name) for file in path.parent.iterdir())
        yield from (
            path.with_name(name[0]) for name in names if name and name.group(1, 3) == part.group(1, 3)
        )
    elif path.exists():
        yield from path.iterdir() if path.is_dir() else (path,)


@dataclass(kw_only=True)
class InputWatcher:
    """Checks the files that steps read in place at each step, and all other inputs before a save."""

    inputs: Mapping[Path, WatchedFile]
    warn: Callable[[str], None]
    frozen: Iterable[np.ndarray]  # arrays that the steps read
    base_is_same: Callable[[], bool]  # True if its content did not change, although its file was written to
    possible_cause: str = ""
    reported: set[Path] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._mapped = mapped_files(self.frozen)

    def check(self) -> None:
        """Raise InputChanged if a file that steps read has different content."""
        for file in self._mapped:
            now = file.current_identity
            if (change := file.describe_change()) is None:
                continue
            if file.has_lost_pages or now.size != file.identity.size or not self.base_is_same():
                raise InputChanged(
                    f"{file.path} {change}; the run is saved, restore the file and continue with --resume"
                )
            file.identity = now
            self.possible_cause = f"{file.path} was written to during the run, which may be the reason"
            if file.path not in self.reported:
                self.reported.add(file.path)
                self.warn(f"{file.path} was written to, but its content looks the same: training continues")

    def report(self) -> None:
        """Warn, once per file, about inputs that changed since the start."""
        for path, watched in self.inputs.items():
            if path not in self.reported and (
                change := describe_change(path, watched.identity, self._mapped)
            ):
                self.reported.add(path)
                after = "training continues with its former content"
                self.warn(
                    f"{path} {change}; {after}"
                    + (", which --resume will need" if watched.needed_to_resume else "")
                )


def describe_change(path: Path, identity: FileIdentity, mapped: Iterable[MappedFile]) -> str:
    """Return how a file changed since the run started, or an empty text."""
    try:
        now = FileIdentity.read(path)
    except OSError:
        return "was deleted"
    if not now.is_same_file(identity):
        return "was replaced"
    return "was written to" if now != identity and all(path != file.path for file in mapped) else ""
