"""The folder of a run, and what may be done in it by one run at a time.

    config.toml  metrics.jsonl  loss.svg     options, figures, curve
    metrics.csv  loggers.json                the same figures, and where else they go, if that was asked
    report.html  samples.jsonl  report.json  its page, what it wrote so far, and what else the page shows
    trace.json                               where the time went, if that was asked
    checkpoint-<step>.gguf                   the last ones
    checkpoint-LATEST.gguf                   another name of the newest
    model.gguf | adapter.gguf                the result
    model-<step>.gguf | adapter-<step>.gguf  those of earlier saves, where they are to be kept
    best.gguf  best-<step>.gguf              that of the best validation, and those that a checkpoint here knows as such
    .replaced-<marks>                        the run that was there, until this one has saved something

All is written beside its place and renamed, so that links are replaced and not followed; the first checkpoint comes first. A run
that is killed leaves a folder that can be gone on with, and perhaps a temporary file that the next one removes. Of one that had
saved nothing nothing stays, and what was there before comes back.
"""

import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

from llamatrain.checkpoints import replaced_run as asides
from llamatrain.checkpoints.checkpoint import Checkpoint, write
from llamatrain.checkpoints.filenames import (
    BEST,
    BEST_STEM,
    LATEST,
    RESULTS,
    best_of,
    can_go_on,
    files_in,
    files_of,
    has_saved,
    is_result,
    is_temporary,
    newest_first,
    numbered,
    results_in,
    same,
    telling,
)
from llamatrain.checkpoints.lock import FolderLock, locked
from llamatrain.checkpoints.new_run_dir import again, instead, made_here, missing_above, next_folder
from llamatrain.checkpoints.read import read
from llamatrain.checkpoints.replaced_run import ASIDE
from llamatrain.config.options import format_flag
from llamatrain.errors import FileError
from llamatrain.io.atomic_write import link_or_copy, move_aside

RUNS = Path("runs")


class RunFolder:
    """An existing folder, taken for writing until `close`."""

    def __init__(self, path: Path) -> None:
        self.path, self.made, self.fresh = path, False, False
        self.aside: Path | None = None
        self.above: list[Path] = []  # folders that were made for it
        self._hold(locked(path))
        with telling(path, "what is in it cannot be seen or changed"):
            for file in files_in(path):
                if is_temporary(file.name):
                    file.unlink()
            asides.sweep(path)
            for aside in asides.of(path):
                if aside.name.startswith(ASIDE) and has_saved(path):
                    asides.remove(aside)
                else:
                    asides.put_back(aside)

    def _hold(self, lock: FolderLock) -> None:
        self._lock = lock
        self.close = weakref.finalize(self, lock.release)

    @classmethod
    def new(cls, out: Path | None, command: str, overwrite: bool = False) -> Self:
        """A folder for a run that begins; without `out` the next `runs/<command>-<n>`. What is in it stays until `clear`."""
        above = missing_above(out or RUNS / command)
        made = out is None or made_here(out)
        folder = cls(out or next_folder(RUNS, command))
        folder.made, folder.above = made, above
        with telling(folder.path, "cannot be looked into"):
            there = [] if overwrite or _is_vain(folder.path) else sorted(files_of(folder.path))
            goes_on = (
                f"{format_flag('resume')} {folder.path} goes on with it, " if can_go_on(folder.path) else ""
            )
        if there:
            folder.close()
            raise FileError(
                f"{folder.path}: there is a run already ({there[0].name}): {goes_on}"
                f"{format_flag('overwrite')} removes it, another {format_flag('out')} leaves it alone"
            )
        return folder

    def clear(self, sources: Iterable[Path] = ()) -> None:
        """Put the run that is in it aside, until the new one has saved something; none of its files may be a source of that."""
        with telling(self.path, "the run there cannot be replaced"):
            if there := files_of(self.path):
                _check_apart(there, sources)
                self.aside = asides.made(self.path)
                for file in there:
                    file.rename(self.aside / file.name)
                self.aside = self.aside.rename(asides.renamed(self.aside, ASIDE))
        self.fresh = True

    def settled(self) -> None:
        """There is something to go on from: what was put aside can go."""
        self.fresh = self.made = False
        if self.aside:
            with suppress(OSError):
                asides.remove(self.aside)
            self.aside = None

    def discard(self) -> None:
        """Where a run ends before it began: everything is as it was."""
        aside, fresh, made = self.aside, self.fresh, self.made
        self.aside, self.fresh, self.made = None, False, False
        with suppress(OSError):
            if fresh:  # the checkpoints last: as long as there is one, it is the run that is there
                for file in sorted(
                    files_of(self.path), key=lambda file: (is_result(file.name), file.name), reverse=True
                ):
                    file.unlink()
            if aside:
                asides.put_back(aside)
            if made:
                self.close()  # what holds it may lie in it
                for folder in (self.path, *self.above):
                    folder.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def result(self, name: str) -> Path:
        """The place of one of the files that a run writes beside its checkpoints."""
        if name not in RESULTS:
            raise ValueError(f"{name} is none of {', '.join(RESULTS)}")
        return self.path / name

    # ---- where it is ------------------------------------------------------

    def found(self) -> str | None:
        """Go where it was moved to, or to one that is made in its place; what is to be said of that."""
        there = self._lock.whereabouts(self.path)
        if there == self.path:
            return None
        before = self.path
        if there:
            self.path = there
            self.aside = self.aside and there / self.aside.name
            return f"the run's folder {before} was moved: it goes on in {there}"
        self._take(next(again(before), None))
        if self.path == before:
            return f"the run's folder {before} was removed: it is made again"
        return f"the run's folder {before} is no more: it goes on in {self.path}"

    def left(self) -> Iterator[Path]:
        """Other folders, one after the other, where this one takes no more files; the run is in the one that was given last."""
        before = self.path
        for place in instead(before):
            self._take(place)
            yield self.path
            with suppress(OSError):  # it was of no use
                for file in files_of(self.path):
                    file.unlink()
                self.path.rmdir()
        self.path = before

    def _take(self, place: tuple[Path, FolderLock] | None) -> None:
        if place is None:
            raise FileError(f"{self.path}: this folder is no more, and no other can be made")
        self.close()
        self.path, self.aside, self.made = place[0], None, False
        self._hold(place[1])

    # ---- checkpoints -------------------------------------------------------

    def save(self, checkpoint: Checkpoint, keep: int) -> Path:
        """Write a checkpoint, and, once it is seen that it can be read, remove those older than the last `keep`."""
        step = checkpoint.state.counters.step
        path = self.path / f"checkpoint-{step}.gguf"
        write(path, checkpoint, check=read)
        link_or_copy(path, self.path / LATEST)
        with suppress(OSError):  # they take room, and do no harm
            older = [file for number, file in sorted(numbered(self.path).items()) if number < step]
            for file in older[: max(0, len(older) - max(keep, 1) + 1)]:
                file.unlink()
        return path

    def rewind(self, step: int) -> None:
        """Go on from an older checkpoint of this folder: those after it are of a run that is given up."""
        with telling(self.path, "its later checkpoints cannot be put aside"):
            file = self.path / f"checkpoint-{step}.gguf"
            if file.exists():  # else it is LATEST itself, or has a name of its own
                link_or_copy(file, self.path / LATEST)
            found = [numbered(self.path), *(results_in(self.path, stem) for stem in ("model", "adapter"))]
            for number, file in (each for files in found for each in files.items()):
                if number > step:
                    move_aside(file)
            for number, file in results_in(self.path, BEST_STEM).items():  # which are made again
                if number > step:
                    if same(file, self.path / BEST):
                        (self.path / BEST).unlink()
                    file.unlink()

    def keep_best(self, step: int, source: Path) -> bool:
        """What was made at that step is the best: the source has it, where it is not there yet. Whether there is any."""
        place = self.path / best_of(step)
        if source.exists() and not same(source, place):
            link_or_copy(source, place)
        if not place.exists():
            return False
        if not same(place, self.path / BEST):
            link_or_copy(place, self.path / BEST)
        return True

    def sweep_best(self) -> None:
        """Of those before the best there stay what a checkpoint goes back to."""
        with suppress(OSError):
            found, steps = results_in(self.path, BEST_STEM), numbered(self.path)
            needed = {max((best for best in found if best <= step), default=None) for step in steps}
            for best, file in list(found.items())[:-1]:
                if best not in needed:
                    file.unlink()

    def keep_result(self, name: str, step: int, keep: int) -> None:
        """Another name for what came of the run so far, which stays as it is; the last `keep` of them do."""
        stem = Path(name).stem
        link_or_copy(self.path / name, self.path / f"{stem}-{step}.gguf")
        with suppress(OSError):
            for file in list(results_in(self.path, stem).values())[:-keep]:
                file.unlink()

    @staticmethod
    def newest(place: Path) -> tuple[Checkpoint, Path, list[str]]:
        """A checkpoint to go on from, its file, and what should be said: of a folder the newest that is sound."""
        with telling(place, "cannot be looked into"):
            if place.is_dir() and asides.of(place):
                with suppress(FileError):  # of a run that goes on
                    RunFolder(place).close()  # of one that was killed: what it had put aside is back
            paths = newest_first(place) if place.is_dir() else [place]
        faults = list[str]()
        for path in paths:
            try:
                checkpoint = read(path)
            except FileError as error:
                faults.append(str(error))
                continue
            passed = [f"a checkpoint that cannot be read is passed over: {fault}" for fault in faults]
            return checkpoint, path, [*passed, *checkpoint.notes]
        if paths == [place]:
            raise FileError(faults[0])
        none = " is in this folder; where a run was ended before its first save, the command that began it begins it anew"
        raise FileError(f"{place}: no checkpoint to go on from" + (f": {faults[0]}" if faults else none))


# ---- taking and making -----------------------------------------------------


def _is_vain(folder: Path) -> bool:
    """Whether what is there is of a run that was ended before its first save."""
    figures = folder / "metrics.jsonl"
    return not has_saved(folder) and figures.is_file() and not figures.stat().st_size


def _check_apart(there: list[Path], sources: Iterable[Path]) -> None:
    """Links, too, are names of what they lead to."""
    taken = {(found.st_dev, found.st_ino) for found in map(os.lstat, there)}
    for source in sources:
        with suppress(OSError):  # what leads nowhere is none of them
            found = source.stat()
            if (found.st_dev, found.st_ino) in taken:
                raise FileError(
                    f"{source}: the run would replace what it reads; give another {format_flag('out')}"
                )
