"""The files that a run was begun with, looked at again while it runs: whether they are still what they were."""

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
    identity: FileIdentity
    needed: bool  # again, when the run goes on with --resume


def inputs_of(paths: Iterable[tuple[Path, bool]]) -> dict[Path, WatchedFile]:
    """As they are before they are opened. One that is not there is told by whoever opens it."""
    return {
        file: WatchedFile(identity=FileIdentity.read(file), needed=needed)
        for path, needed in paths
        for file in there(path)
    }


def there(path: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from (file for file in parts_of(path) if file.is_file())


def parts_of(path: Path) -> Iterator[Path]:
    """All parts of a split model, all files of a folder; else the file itself."""
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
    """What steps read in place is asked for in each of them, all else before a save, where it can do no harm any more."""

    inputs: Mapping[Path, WatchedFile]
    warn: Callable[[str], None]
    frozen: Iterable[np.ndarray]  # arrays that the steps read
    is_same: Callable[[], bool]  # whether the base is, though it was written to
    possible_cause: str = ""
    told: set[Path] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._read = mapped_files(self.frozen)

    def check(self) -> None:
        for file in self._read:
            now = file.current_identity
            if (what := file.describe_change()) is None:
                continue
            if file.has_lost_pages or now.size != file.identity.size or not self.is_same():
                raise InputChanged(
                    f"{file.path}: {what}, and the run is saved; once it is what it was, --resume goes on"
                )
            file.identity = now
            self.possible_cause = f"{file.path} was written to while it was being read, which may be why"
            if file.path not in self.told:
                self.told.add(file.path)
                self.warn(
                    f"{file.path}: was written to, and where it was looked at it is what it was: the run goes on"
                )

    def report(self) -> None:
        """Before a save; of each file once."""
        for path, began in self.inputs.items():
            if path not in self.told and (what := happened(path, began.identity, self._read)):
                self.told.add(path)
                after = "the run goes on with what it began with"
                self.warn(
                    f"{path}: {what}; {after}" + (", and --resume will need that" if began.needed else "")
                )


def happened(path: Path, began: FileIdentity, read: Iterable[MappedFile]) -> str:
    """To a file, since a run began with it."""
    try:
        now = FileIdentity.read(path)
    except OSError:
        return "is not there any more"
    if not now.is_same_file(began):
        return "is another file by now"
    return "was written to" if now != began and all(path != file.path for file in read) else ""
