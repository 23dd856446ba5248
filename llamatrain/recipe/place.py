"""Where a run lives: its folder, what it may replace there, and that of PEFT beside it."""

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from llamatrain.adapters import peft
from llamatrain.config.file import config_text
from llamatrain.data.sources import find_sources
from llamatrain.errors import FileError, UsageError
from llamatrain.recipe.asked import Asked
from llamatrain.recipe.model import OWN_SIZE
from llamatrain.recipe.options import PlaceOptions
from llamatrain.recipe.prepare import Prepared
from llamatrain.recipe.request import Request
from llamatrain.recipe.resume import Resumed
from llamatrain.recipe.sources import Sources
from llamatrain.report.metrics import Metrics
from llamatrain.store.folder import RunFolder
from llamatrain.store.names import numbered


def folder_of(command: str, place: PlaceOptions, sources: Sources) -> RunFolder:
    """A new folder, or the one that the run has."""
    home = sources.home if place.resume else None
    if home is None or (place.out and os.path.realpath(place.out) != os.path.realpath(home)):
        return RunFolder.new(place.out, command, place.overwrite)
    assert place.resume
    if place.resume.is_file() and any(later > sources.step for later in numbered(home)):
        raise UsageError(
            f"{place.resume}: its folder has later checkpoints; --resume {home} takes the newest, --out begins another run"
        )
    return RunFolder(home)


def settle(prepared: Prepared, folder: RunFolder, place: PlaceOptions) -> None:
    """Make the folder the run's own."""
    if folder.path == prepared.sources.home:
        folder.rewind(prepared.sources.step)  # past those that are damaged
    else:
        folder.clear(read_by(prepared, place))


def read_by(prepared: Prepared, place: PlaceOptions) -> Iterator[Path]:
    """All files that a run is made from."""
    sources, kept = prepared.sources, prepared.kept
    yield from (path for path in (kept.model.vocab_from, place.config) if path)
    yield from (path for path in (sources.base and sources.base.path, sources.resumed and sources.resumed.path) if path)
    for adapter in kept.adapters:
        yield from adapter.iterdir() if adapter.is_dir() else (adapter,)
    for names in (kept.files, kept.data.val):
        yield from (source.path for source in (find_sources(names) if names else ()))


def config_of(kept: Asked) -> str:
    """A file that says the same run again."""
    new = kept.command == "from-scratch"
    unsaid = {*kept.idle, *(OWN_SIZE if new and kept.base else ()), "max_time"}  # that was for the process it was given to
    first = f" --checkpoint-in {shlex.quote(kept.base)}" if new and kept.base else ""
    head = f"llamatrain {kept.command}{first} --config FILE"
    return config_text(head, kept.files, list(kept.parts.values()), unsaid, base="" if new else kept.base)


def metrics_of(sources: Sources, folder: RunFolder) -> Metrics:
    """New, or those of the run so far; in a new folder its first part is told, too."""
    name = "metrics.jsonl"
    return Metrics(folder.result(name), sources.home and sources.home / name, sources.step)


# ---- of PEFT ---------------------------------------------------------------


def peft_folder(asked: Asked, sources: Sources, folder: RunFolder, request: Request) -> tuple[Path | None, list[str]]:
    """The folder for PEFT replaces nothing that is read or was not asked for; that of another run is left to it, and so is one
    that only a checkpoint names, unless it lies in the run's own folder. And what is to be said of that."""
    path, place = asked.tune.peft, request.place
    elsewhere = sources.home is not None and folder.path != sources.home
    if path is None or (elsewhere and "peft" not in request.given):
        return None, []
    real, said = os.path.realpath(path), "peft" in request.said
    if "peft" not in request.given and not Path(real).is_relative_to(os.path.realpath(folder.path)):
        return None, [f"the adapter is not written to {path}, which the checkpoint alone names; --peft {path} writes it there"]
    for read in asked.adapters:
        if os.path.realpath(read) == real:
            raise UsageError(f"--peft {path} would replace {read}, which is being read: another name will do")
    peft.check_place(path)
    kept = peft_before(sources.resumed)
    own = not elsewhere and kept is not None and os.path.realpath(kept) == real
    there = any((path / name).exists() for name in (peft.CONFIG, peft.WEIGHTS, peft.PICKLE))
    if there and not own and not (place.overwrite and said):
        replaced = "" if place.resume else ", --overwrite replaces it" if said else f", --overwrite --peft {path} replaces it"
        raise FileError(f"{path}: there is an adapter already; another --peft leaves it alone{replaced}")
    return path, []


def peft_before(resumed: Resumed | None) -> str | None:
    before = resumed.checkpoint.options.get("tune") if resumed else None
    kept = before.get("peft") if isinstance(before, dict) else None
    return kept if isinstance(kept, str) else None
