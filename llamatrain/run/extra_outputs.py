"""Files that a run writes beside its folder at each save: under names in which the step stands, and under one of the newest."""

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


def may_write(path: Path, folder: Path, resumed: ResumePoint | None) -> bool:
    """Tell whether a run writes to a place that only its checkpoint names: to one in its folder, if this user wrote that."""
    inside = Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
    return resumed is not None and resumed.own and inside


def named_here(
    options: ExtraOutputOptions, given: Collection[str], folder: Path, resumed: ResumePoint | None
) -> tuple[ExtraOutputOptions, ExtraOutputOptions, list[str]]:
    """Leave out the files that only a checkpoint names. Return what is written, what is kept for the next run, and notes."""
    written, notes = options, list[str]()
    if resumed is None or not resumed.kept:
        return options, options, notes
    for name, file in options.said.items():
        if name not in given and not may_write(Path(file).parent, folder, resumed):
            unnamed: dict[str, Any] = {name: ""}
            written = replace(written, **unnamed)
            notes.append(
                f"{file} is not written, since only the checkpoint names it; {format_flag(name)} {file} does that"
            )
    if resumed.own:
        return written, options, notes
    words: dict[str, Any] = {
        name: getattr(ExtraOutputOptions, name)
        for name in ("pattern_fn_it", "fn_latest")
        if name not in given
    }
    written = replace(written, **words)
    return written, written, notes


def flags_of(options: ExtraOutputOptions, peft: Path | None, folder: Path) -> str:
    """Name the places outside a run's folder again, as the command that goes on with it needs them."""
    places = {**options.said, **({"peft": str(peft)} if peft else {})}
    outside = {
        name: file for name, file in places.items() if not Path(file).is_relative_to(folder.absolute())
    }
    return "".join(f" {format_flag(name)} {shlex.quote(file)}" for name, file in outside.items())


def check(
    options: ExtraOutputOptions,
    folder: Path,
    reads: Iterable[Path],
    resumed: ResumePoint | None,
    place: RunFolderOptions,
) -> None:
    """That there is room for them, and that they replace nothing that is read, and without leave nothing of others."""
    kept, read, taken = outs_before(resumed), list(reads), dict[Path, str]()
    for name, said in options.said.items():
        newest, names, flag = options.file(name, None), options.files(name), format_flag(name)
        home = newest.parent
        if not home.is_dir() or not os.access(home, os.W_OK):
            raise FileError(f"{flag} {said}: {home} is no folder that can be written to")
        if (other := taken.setdefault(newest, flag)) != flag:
            raise UsageError(f"{other} and {flag} are one file, {said}: another name will do")
        real = os.path.realpath(home)
        if real == os.path.realpath(folder) and (
            is_run_file(newest.name) or is_run_file(options.file(name, 0).name)
        ):
            raise UsageError(f"{flag} {said} is a name of the run's own files: another will do")
        continued = name == "checkpoint_out" and resumed is not None and is_one_of(resumed.path, names, real)
        for each in read:
            if is_one_of(each, names, real) and not (continued and resumed and each == resumed.path):
                raise UsageError(
                    f"{flag} {said} would replace {each}, which is being read: another name will do"
                )
        there = sorted(each.name for each in home.iterdir() if names.fullmatch(each.name))
        if there and not (place.overwrite or continued or kept.get(name) == said):
            told = f"{home / there[0]}: is there, and not of this run: another {flag} leaves it alone"
            raise FileError(told if place.resume else f"{told}, {format_flag('overwrite')} replaces it")


def is_one_of(path: Path, names: re.Pattern[str], home: str) -> bool:
    return names.fullmatch(path.name) is not None and os.path.realpath(path.parent) == home


def outs_before(resumed: ResumePoint | None) -> Mapping[str, Any]:
    """As the run that goes on had them."""
    kept = resumed.checkpoint.options.get("outs") if resumed else None
    return kept if isinstance(kept, dict) else {}


# ---- written ---------------------------------------------------------------


@dataclass(frozen=True)
class ExtraOutputs:
    """Where they go at each save."""

    options: ExtraOutputOptions

    def write(self, step: int, checkpoint: Path, result: Path) -> None:
        """Of what lies in the folder by now."""
        for name in self.options.said:
            place, newest = self.options.file(name, step), self.options.file(name, None)
            copy_file(checkpoint if name == "checkpoint_out" else result, place)
            if newest != place:
                link_or_copy(place, newest)

    @property
    def newest(self) -> list[Path]:
        return [self.options.file(name, None) for name in self.options.said]
