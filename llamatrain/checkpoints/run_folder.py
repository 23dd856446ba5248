"""The folder of a run, which one run at a time may write to.

    config.toml  metrics.jsonl  loss.svg     options, metrics, loss curve
    metrics.csv  loggers.json                the same metrics, and other loggers, if requested
    report.html  samples.jsonl  report.json  the page, its samples, and other data it shows
    evaluations.jsonl                        results of `evaluate --report`
    trace.json                               the profile, if requested
    checkpoint-<step>.gguf                   the last ones
    checkpoint-LATEST.gguf                   another name of the newest
    model.gguf | adapter.gguf                the result
    model-<step>.gguf | adapter-<step>.gguf  results of earlier saves, if they are to be kept
    best.gguf  best-<step>.gguf              the result of the best validation, and earlier ones that checkpoints need
    .replaced-<marks>                        the previous run, until this one has saved something

All files are written under a temporary name and renamed, so links are replaced and not followed; the first
checkpoint comes first. A killed run leaves a folder that can be resumed, and perhaps a temporary file that
the next run removes. If it had saved nothing, nothing is left of it, and the previous run is restored.
"""

import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

from llamatrain.checkpoints import replaced_run as asides
from llamatrain.checkpoints.checkpoint import Checkpoint, write_checkpoint
from llamatrain.checkpoints.filenames import (
    BEST,
    BEST_STEM,
    LATEST,
    RESULTS,
    best_filename,
    can_resume,
    checkpoints_newest_first,
    has_saved,
    is_result,
    is_same_file,
    is_temporary,
    list_files,
    numbered_checkpoints,
    numbered_results,
    run_files,
)
from llamatrain.checkpoints.lock import FolderLock, lock_folder
from llamatrain.checkpoints.new_run_dir import (
    create_next_folder,
    ensure_folder,
    fallback_folders,
    missing_parents,
    recreate_folder,
)
from llamatrain.checkpoints.read import read_checkpoint
from llamatrain.checkpoints.replaced_run import REPLACED
from llamatrain.config.options import format_flag
from llamatrain.errors import FileError, wrap_os_errors
from llamatrain.io.atomic_write import link_or_copy, move_aside

RUNS = Path("runs")


class RunFolder:
    """An existing folder, locked for writing until `close`."""

    def __init__(self, path: Path) -> None:
        self.path, self.is_new, self.is_cleared = path, False, False
        self.replaced: Path | None = None
        self.created_parents: list[Path] = []  # folders created for it
        self._keep_lock(lock_folder(path))
        with wrap_os_errors(path, "its files cannot be read or changed"):
            for file in list_files(path):
                if is_temporary(file.name):
                    file.unlink()
            asides.remove_empty(path)
            for aside in asides.find_replaced(path):
                if aside.name.startswith(REPLACED) and has_saved(path):
                    asides.remove(aside)
                else:
                    asides.restore(aside)

    def _keep_lock(self, lock: FolderLock) -> None:
        self._lock = lock
        self.close = weakref.finalize(self, lock.release)

    @classmethod
    def create(cls, out: Path | None, command: str, overwrite: bool = False) -> Self:
        """Return a folder for a new run; without `out` the next `runs/<command>-<n>`.

        Existing files stay until `replace_run`.
        """
        parents = missing_parents(out or RUNS / command)
        is_new = out is None or ensure_folder(out)
        folder = cls(out or create_next_folder(RUNS, command))
        folder.is_new, folder.created_parents = is_new, parents
        with wrap_os_errors(folder.path, "cannot be read"):
            existing = [] if overwrite or _is_unsaved_run(folder.path) else sorted(run_files(folder.path))
            resume_hint = (
                f"resume it with {format_flag('resume')} {folder.path}, " if can_resume(folder.path) else ""
            )
        if existing:
            folder.close()
            raise FileError(
                f"{folder.path}: the folder already contains a run ({existing[0].name}); "
                f"{resume_hint}replace it with {format_flag('overwrite')}, or choose another "
                f"{format_flag('out')}",
                code="run-exists",
            )
        return folder

    def replace_run(self, sources: Iterable[Path] = ()) -> None:
        """Set the existing run aside until the new one has saved something.

        None of its files may be a source of the new run.
        """
        with wrap_os_errors(self.path, "the run there cannot be replaced"):
            if existing := run_files(self.path):
                _check_not_a_source(existing, sources)
                self.replaced = asides.create_replacing(self.path)
                for file in existing:
                    file.rename(self.replaced / file.name)
                self.replaced = self.replaced.rename(asides.with_prefix(self.replaced, REPLACED))
        self.is_cleared = True

    def remove_replaced(self) -> None:
        """Remove the replaced run: there is a checkpoint of the new one."""
        self.is_cleared = self.is_new = False
        if self.replaced:
            with suppress(OSError):
                asides.remove(self.replaced)
            self.replaced = None

    def undo(self) -> None:
        """Restore the folder as it was, if a run ends before its first save."""
        replaced, is_cleared, is_new = self.replaced, self.is_cleared, self.is_new
        self.replaced, self.is_cleared, self.is_new = None, False, False
        with suppress(OSError):
            if is_cleared:  # checkpoints last: while one exists, the run is still resumable
                for file in sorted(
                    run_files(self.path), key=lambda file: (is_result(file.name), file.name), reverse=True
                ):
                    file.unlink()
            if replaced:
                asides.restore(replaced)
            if is_new:
                self.close()  # the lock file may be in it
                for folder in (self.path, *self.created_parents):
                    folder.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def result_path(self, name: str) -> Path:
        """Return the path of a result file by name."""
        if name not in RESULTS:
            raise ValueError(f"{name} is none of {', '.join(RESULTS)}")
        return self.path / name

    # ---- where it is ------------------------------------------------------

    def locate(self) -> str | None:
        """Follow the folder if it was moved, or replace it if it is gone; return a message about that."""
        current = self._lock.current_path(self.path)
        if current == self.path:
            return None
        before = self.path
        if current:
            self.path = current
            self.replaced = self.replaced and current / self.replaced.name
            return f"the run's folder {before} was moved; the run continues in {current}"
        self._switch_to(next(recreate_folder(before), None))
        if self.path == before:
            return f"the run's folder {before} was removed; it was created again"
        return f"the run's folder {before} is gone; the run continues in {self.path}"

    def move_to_fallbacks(self) -> Iterator[Path]:
        """Yield other folders, one after the other, if this one cannot be written; the last one stays in use."""
        before = self.path
        for fallback in fallback_folders(before):
            self._switch_to(fallback)
            yield self.path
            with suppress(OSError):  # writing there failed as well
                for file in run_files(self.path):
                    file.unlink()
                self.path.rmdir()
        self.path = before

    def _switch_to(self, folder: tuple[Path, FolderLock] | None) -> None:
        if folder is None:
            raise FileError(
                f"{self.path}: the folder is gone, and no other could be created", code="folder-lost"
            )
        self.close()
        self.path, self.replaced, self.is_new = folder[0], None, False
        self._keep_lock(folder[1])

    # ---- checkpoints -------------------------------------------------------

    def save(self, checkpoint: Checkpoint, keep: int) -> Path:
        """Write and verify a checkpoint, then remove checkpoints older than the last `keep`."""
        step = checkpoint.state.counters.step
        path = self.path / f"checkpoint-{step}.gguf"
        write_checkpoint(path, checkpoint, check=read_checkpoint)
        link_or_copy(path, self.path / LATEST)
        with suppress(OSError):  # old checkpoints only take space
            older = [
                file for number, file in sorted(numbered_checkpoints(self.path).items()) if number < step
            ]
            for file in older[: max(0, len(older) - max(keep, 1) + 1)]:
                file.unlink()
        return path

    def rewind(self, step: int) -> None:
        """Make an older checkpoint the latest; those after it are renamed, as their run is abandoned."""
        with wrap_os_errors(self.path, "its later checkpoints cannot be renamed"):
            file = self.path / f"checkpoint-{step}.gguf"
            if file.exists():  # otherwise it is LATEST itself, or has another name
                link_or_copy(file, self.path / LATEST)
            files_by_step = [
                numbered_checkpoints(self.path),
                *(numbered_results(self.path, stem) for stem in ("model", "adapter")),
            ]
            for number, file in (entry for files in files_by_step for entry in files.items()):
                if number > step:
                    move_aside(file)
            for number, file in numbered_results(self.path, BEST_STEM).items():  # these are written again
                if number > step:
                    if is_same_file(file, self.path / BEST):
                        (self.path / BEST).unlink()
                    file.unlink()

    def link_best(self, step: int, source: Path) -> bool:
        """Make the result of a step the best one; return False if there is no result."""
        target = self.path / best_filename(step)
        if source.exists() and not is_same_file(source, target):
            link_or_copy(source, target)
        if not target.exists():
            return False
        if not is_same_file(target, self.path / BEST):
            link_or_copy(target, self.path / BEST)
        return True

    def prune_best(self) -> None:
        """Remove earlier best results that no checkpoint needs."""
        with suppress(OSError):
            results, steps = numbered_results(self.path, BEST_STEM), numbered_checkpoints(self.path)
            needed = {max((best for best in results if best <= step), default=None) for step in steps}
            for best, file in list(results.items())[:-1]:
                if best not in needed:
                    file.unlink()

    def link_result(self, name: str, step: int, keep: int) -> None:
        """Link the present result under its step's name, and remove all but the last `keep`."""
        stem = Path(name).stem
        link_or_copy(self.path / name, self.path / f"{stem}-{step}.gguf")
        with suppress(OSError):
            for file in list(numbered_results(self.path, stem).values())[:-keep]:
                file.unlink()

    @staticmethod
    def read_newest(path: Path) -> tuple[Checkpoint, Path, list[str]]:
        """Return a checkpoint to resume from, its file, and warnings; in a folder the newest valid one."""
        with wrap_os_errors(path, "cannot be read"):
            if path.is_dir() and asides.find_replaced(path):
                with suppress(FileError):  # a run is using it
                    RunFolder(path).close()  # restores what a killed run had set aside
            paths = checkpoints_newest_first(path) if path.is_dir() else [path]
        errors = list[FileError]()
        for file in paths:
            try:
                checkpoint = read_checkpoint(file)
            except FileError as error:
                errors.append(error)
                continue
            warnings = [f"skipped a checkpoint that cannot be read: {fault}" for fault in errors]
            return checkpoint, file, [*warnings, *checkpoint.notes]
        if paths == [path]:
            raise errors[0]
        hint = "if a run ended before its first save, start it again with the same command"
        raise FileError(
            f"{path}: no checkpoint to resume from; {errors[0] if errors else hint}", code="no-checkpoint"
        )


# ---- taking and making -----------------------------------------------------


def _is_unsaved_run(folder: Path) -> bool:
    """Return True if the folder holds only a run that ended before its first save."""
    figures = folder / "metrics.jsonl"
    return not has_saved(folder) and figures.is_file() and not figures.stat().st_size


def _check_not_a_source(existing: list[Path], sources: Iterable[Path]) -> None:
    """Raise if a file to be replaced is a source of the run; links count as their targets."""
    identities = {(status.st_dev, status.st_ino) for status in map(os.lstat, existing)}
    for source in sources:
        with suppress(OSError):  # a broken link
            status = source.stat()
            if (status.st_dev, status.st_ino) in identities:
                raise FileError(
                    f"{source}: the run would overwrite its own input; choose another {format_flag('out')}",
                    code="overwrites-input",
                )
