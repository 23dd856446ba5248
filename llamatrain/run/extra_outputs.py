"""Writes extra output files at each save: one named by the step, and one for the newest."""

import os
import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llamatrain.checkpoints.filenames import is_run_file
from llamatrain.config.options import format_flag
from llamatrain.errors import FileError, UsageError
from llamatrain.io.atomic_write import copy_file, link_or_copy
from llamatrain.run.extra_output_options import ExtraOutputOptions
from llamatrain.run.options import RunFolderOptions
from llamatrain.run.resume import ResumePoint

# ---- before a run ----------------------------------------------------------


def may_write(path: Path, folder: Path, resume_point: ResumePoint | None) -> bool:
    """Return True if a run may write to a path that only its checkpoint names.

    The user must have written the checkpoint, and the path must lie inside the run's folder.
    """
    inside = Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
    return resume_point is not None and resume_point.is_own and inside


def drop_unnamed(
    options: ExtraOutputOptions, given: Collection[str], folder: Path, resume_point: ResumePoint | None
) -> tuple[ExtraOutputOptions, ExtraOutputOptions, list[str]]:
    """Leave out the files that only a checkpoint names. Return what is written, what is stored, and notes."""
    written, notes = options, list[str]()
    if resume_point is None or not resume_point.has_options:
        return options, options, notes
    for name, file in options.files_by_option.items():
        if name not in given and not may_write(Path(file).parent, folder, resume_point):
            unnamed: dict[str, Any] = {name: ""}
            written = replace(written, **unnamed)
            notes.append(
                f"{file} is not written, since only the checkpoint names it; add {format_flag(name)} "
                f"{file} to write it"
            )
    if resume_point.is_own:
        return written, options, notes
    words: dict[str, Any] = {
        name: getattr(ExtraOutputOptions, name)
        for name in ("pattern_fn_it", "fn_latest")
        if name not in given
    }
    written = replace(written, **words)
    return written, written, notes


def format_flags(options: ExtraOutputOptions, peft: Path | None, folder: Path) -> str:
    """Return the flags that name the files outside the run's folder, for the command that resumes it."""
    places = {**options.files_by_option, **({"peft": str(peft)} if peft else {})}
    outside = {
        name: file for name, file in places.items() if not Path(file).is_relative_to(folder.absolute())
    }
    return "".join(f" {format_flag(name)} {shlex.quote(file)}" for name, file in outside.items())


def check_extra_outputs(
    options: ExtraOutputOptions,
    folder: Path,
    reads: Iterable[Path],
    resume_point: ResumePoint | None,
    folder_options: RunFolderOptions,
) -> None:
    """Raise if an extra output cannot be written, or would replace an input or a file of another run."""
    stored, inputs, taken = stored_outputs(resume_point), list(reads), dict[Path, str]()
    for name, file in options.files_by_option.items():
        newest, names, flag = options.path_at_step(name, None), options.name_pattern(name), format_flag(name)
        folder_of_file = newest.parent
        if not folder_of_file.is_dir() or not os.access(folder_of_file, os.W_OK):
            raise FileError(
                f"{flag} {file}: cannot write to the folder {folder_of_file}", code="unwritable-folder"
            )
        if (other := taken.setdefault(newest, flag)) != flag:
            raise UsageError(
                f"{other} and {flag} name the same file, {file}; choose another name", code="same-file"
            )
        real = os.path.realpath(folder_of_file)
        if real == os.path.realpath(folder) and (
            is_run_file(newest.name) or is_run_file(options.path_at_step(name, 0).name)
        ):
            raise UsageError(
                f"{flag} {file} would replace a file of the run itself; choose another name",
                code="replaces-own-file",
            )
        continued = (
            name == "checkpoint_out"
            and resume_point is not None
            and matches_output(resume_point.path, names, real)
        )
        for input_path in inputs:
            if matches_output(input_path, names, real) and not (
                continued and resume_point and input_path == resume_point.path
            ):
                raise UsageError(
                    f"{flag} {file} would replace the input {input_path}; choose another name",
                    code="replaces-input",
                )
        existing = sorted(file.name for file in folder_of_file.iterdir() if names.fullmatch(file.name))
        if existing and not (folder_options.overwrite or continued or stored.get(name) == file):
            problem = (
                f"{folder_of_file / existing[0]} exists and belongs to another run; choose another {flag}"
            )
            raise FileError(
                problem
                if folder_options.resume
                else f"{problem}, or add {format_flag('overwrite')} to replace it",
                code="output-exists",
            )


def matches_output(path: Path, names: re.Pattern[str], home: str) -> bool:
    """Return True if a path is one of an option's output files."""
    return names.fullmatch(path.name) is not None and os.path.realpath(path.parent) == home


def stored_outputs(resume_point: ResumePoint | None) -> Mapping[str, Any]:
    """Return the extra outputs of the run that is resumed."""
    outputs = resume_point.checkpoint.options.get("outs") if resume_point else None
    return outputs if isinstance(outputs, dict) else {}


# ---- written ---------------------------------------------------------------


@dataclass(frozen=True)
class ExtraOutputs:
    """The extra output files of a run."""

    options: ExtraOutputOptions

    def write(self, step: int, checkpoint: Path, result: Path) -> None:
        """Copy the checkpoint or the result of a step to each extra output."""
        for name in self.options.files_by_option:
            place, newest = self.options.path_at_step(name, step), self.options.path_at_step(name, None)
            copy_file(checkpoint if name == "checkpoint_out" else result, place)
            if newest != place:
                link_or_copy(place, newest)

    @property
    def newest(self) -> list[Path]:
        """The paths of the newest extra files."""
        return [self.options.path_at_step(name, None) for name in self.options.files_by_option]
