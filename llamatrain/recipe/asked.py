"""Where a run begins: with options alone, with a model's file, or with the checkpoint of a run that goes on."""

import glob
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from llamatrain.adapters.options import LoraOptions
from llamatrain.config.options import flag_of, from_plain, plain
from llamatrain.data.options import DataOptions
from llamatrain.errors import FileError, UsageError
from llamatrain.files.reader import Gguf, open_gguf
from llamatrain.model.options import ModelOptions
from llamatrain.recipe import options as training
from llamatrain.recipe import tuning
from llamatrain.recipe.options import AUTO, PlaceOptions, RunOptions, TrainOptions, refuse_idle
from llamatrain.recipe.tuning import TuneOptions
from llamatrain.store.checkpoint import Checkpoint
from llamatrain.store.folder import RunFolder

PARTS = {
    "model": ModelOptions,
    "data": DataOptions,
    "train": TrainOptions,
    "run": RunOptions,
    "tune": TuneOptions,
    "lora": LoraOptions,
}
# beside all of RunOptions: what may change when a run goes on
FREE = {"iters": "train", "memory": "train", "precision": "train", "val": "data", "force_reshuffle": "data",
        "adapter_type": "tune", "peft": "tune", "only_write_lora": "tune", "cache_base": "tune",
        "lora_scaled": "lora"}  # fmt: skip
SAID = ("iters", "threads", "precision", "cache_base")  # of those, what is said of it


@dataclass(frozen=True)
class Options:
    """All that a run is told and keeps."""

    files: tuple[str, ...]
    model: ModelOptions
    data: DataOptions
    train: TrainOptions
    run: RunOptions
    tune: TuneOptions = field(default_factory=TuneOptions)
    lora: LoraOptions = field(default_factory=LoraOptions)
    command: str = "from-scratch"
    base: str = ""  # the model's file that is tuned

    @property
    def parts(self) -> dict[str, Any]:
        """Those that the command has."""
        own = ("model", "data", "train", "run") if self.command == "from-scratch" else ("data", "train", "run", "tune", "lora")
        return {name: getattr(self, name) for name in own}

    @property
    def idle(self) -> dict[str, str]:
        """The options that have no effect beside the others, and beside which."""
        found = training.idle(self.train, self.run)
        return found if self.command == "from-scratch" else found | tuning.idle(self.tune, self.train.optimizer)

    def plain(self) -> dict[str, Any]:
        parts = {name: plain(part) for name, part in self.parts.items()}
        parts["data"]["force_reshuffle"] = False  # once is enough
        return {"command": self.command, "base": self.base, "files": list(self.files), **parts}

    def settled(self) -> "Options":
        """With paths that mean the same from any folder."""
        vocab, first, peft = (
            path and Path(absolute([str(path)])[0]) for path in (self.model.vocab_from, self.tune.lora_init, self.tune.peft)
        )
        scaled = tuple((Path(absolute([str(path)])[0]), scale) for path, scale in self.lora.scaled)
        return replace(
            self, files=absolute(self.files), base=absolute([self.base])[0] if self.base else "",
            model=replace(self.model, vocab_from=vocab), data=replace(self.data, val=absolute(self.data.val)),
            tune=replace(self.tune, lora_init=first, peft=peft), lora=LoraOptions((), scaled),
        )  # fmt: skip

    @classmethod
    def from_plain(cls, kept: Mapping[str, Any], source: object) -> "Options":
        files, command, base = kept.get("files", []), kept.get("command", ""), kept.get("base", "")
        parts = {name: kept.get(name, {}) for name in PARTS}
        sound = isinstance(files, list) and all(isinstance(text, str) for text in (*files, command, base))
        if not sound or not all(isinstance(part, dict) for part in parts.values()):
            raise FileError(f"{source}: its options are damaged")
        try:
            made: dict[str, Any] = {name: from_plain(kind, parts[name], source) for name, kind in PARTS.items()}
        except UsageError as error:
            raise FileError(str(error)) from None
        return cls(tuple(files), **made, command=command, base=base)


@dataclass(frozen=True)
class Start:
    """Nothing, a model's file (the one that is tuned, or the first weights), or a checkpoint."""

    model: Gguf | None = None
    checkpoint: Checkpoint | None = None
    path: Path | None = None  # of the checkpoint
    notes: tuple[str, ...] = ()


def start_of(place: PlaceOptions, command: str, base: str) -> Start:
    """What there is to begin with, which must be of this command."""
    path = place.resume or place.checkpoint_in
    if path is None or (not place.resume and open_gguf(path).kind != "checkpoint"):
        return Start(base_of(base) if base else open_gguf(path) if path else None)
    checkpoint, found, notes = RunFolder.newest(path)
    kept = checkpoint.options.get("command", "from-scratch")
    if kept != command:
        raise UsageError(f"{found}: a checkpoint of {kept}; go on with `llamatrain {kept} --resume {path}`")
    tuned = checkpoint.options.get("tune")
    whole = isinstance(tuned, dict) and tuned.get("full") is True  # every weight is in the checkpoint itself
    base = "" if whole else base or str(checkpoint.options.get("base", ""))
    if base and not Path(base).exists():
        moved = f"if it was moved, name it: llamatrain finetune BASE.gguf --resume {path}"
        raise FileError(f"{base}: no such file, and the run in {found} is for it; {moved}")
    return Start(base_of(base) if base else open_gguf(found), checkpoint, found, tuple(notes))


def base_of(path: str) -> Gguf:
    gguf = open_gguf(path)
    if gguf.kind == "checkpoint" and gguf.metadata.get("training.type") == "finetune_lora":
        raise UsageError(f"{path}: a checkpoint of an adapter, no model; go on with `llamatrain finetune --resume {path}`")
    return gguf


def gone_on_with(options: Options, start: Start, given: Collection[str]) -> tuple[Options, list[str]]:
    """A checkpoint's options, with those changed that may be; and what is to be said of it."""
    assert start.checkpoint
    if not start.checkpoint.options:  # an ancestor's: it kept none
        return options, []
    kept, options = Options.from_plain(start.checkpoint.options, start.path), options.settled()
    given = {"lora_scaled" if name == "lora" else name for name in given}  # as they are settled
    changed: dict[str, dict[str, Any]] = {name: {} for name in PARTS}
    said = list[str]()
    free = {each.name: "run" for each in fields(RunOptions)} | FREE
    for part in options.parts:
        for name in (each.name for each in fields(getattr(options, part))):
            asked, before = getattr(getattr(options, part), name), getattr(getattr(kept, part), name)
            if name not in given or asked in (before, AUTO):  # what was open is decided already
                continue
            if name not in free:
                raise UsageError(f"{flag_of(name)} may not change when a run goes on: it has {worded(before)}; leave it out")
            changed[free[name]][name] = asked
            if name in SAID:
                said.append(f"{flag_of(name)} is {asked} from now on" + (f", and was {before}" if before is not None else ""))
    if options.files and options.files != kept.files:
        before = " ".join(kept.files) or "the sine wave"
        raise UsageError(f"the data may not change when a run goes on: it has {before}; leave it out")
    if options.base and options.base != kept.base:
        if kept.tune.full:
            raise UsageError(f"a run of --full goes on from its checkpoint, not from {options.base}; leave it out")
        kept = replace(kept, base=options.base)  # it may have been moved; whether it is the same one is seen when it is read
    if "-" in kept.files and sys.stdin.isatty():
        raise UsageError("the run's data came from standard input: give it there again")
    if changed["train"].get("precision") == "f32" and kept.tune.cache_base == "bf16" and "cache_base" not in given:
        changed["tune"]["cache_base"] = "off"
        said.append("--cache-base is off from now on: copies in bf16 are for products in bf16")
    made = replace(kept, **{part: replace(getattr(kept, part), **values) for part, values in changed.items()})
    refuse_idle(made.idle, given)
    if "iters" in changed["train"] and kept.train.schedule != "constant" and kept.train.optimizer != "lbfgs":
        said.append(f"the schedule stays: after step {kept.train.iters} the rate is --lr-min {kept.train.lr_min:g}")
    if "precision" in changed["train"] or "cache_base" in changed["tune"]:
        said.append("so the run is not, to the bit, what it would have been")
    return made, said


def worded(value: Any) -> str:
    """An option's value, as it is given."""
    if isinstance(value, tuple):
        return " ".join(map(worded, value)) or "none"
    return {None: "none", True: "it on", False: "it off"}[value] if value is None or isinstance(value, bool) else str(value)


def absolute(files: Sequence[str]) -> tuple[str, ...]:
    """So that a run goes on from any folder."""
    here = os.getcwd()  # noqa: PTH109 - as it is spelt
    homes = {True: glob.escape(here), False: here}  # a pattern stays one, and a folder's name becomes none
    return tuple(file if file == "-" else os.path.normpath(Path(homes[glob.has_magic(file)]) / file) for file in files)
