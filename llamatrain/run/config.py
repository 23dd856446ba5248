"""What was asked of a run, the first of three stages: asked, resolved, fitted."""

import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from llamatrain.adapters.options import AdapterOptions
from llamatrain.config.options import from_plain, plain
from llamatrain.data.options import DataOptions
from llamatrain.errors import FileError, UsageError
from llamatrain.model.options import ModelOptions
from llamatrain.optim import registry
from llamatrain.preference import options as preference
from llamatrain.preference.options import PreferenceOptions
from llamatrain.run import extra_output_options as outs
from llamatrain.run import lora_options
from llamatrain.run.extra_output_options import ExtraOutputOptions
from llamatrain.run.lora_options import LoraOptions
from llamatrain.run.options import PASSING, RunOptions, TrainOptions

PARTS = {
    "model": ModelOptions,
    "data": DataOptions,
    "train": TrainOptions,
    "run": RunOptions,
    "tune": LoraOptions,
    "lora": AdapterOptions,
    "outs": ExtraOutputOptions,
    "preference": PreferenceOptions,
}
TUNED = ("data", "train", "run", "tune", "preference", "lora", "outs")
# by the command, those that it has
OF = {"from-scratch": ("model", "data", "train", "run", "outs"), "finetune": TUNED}
DECIDED = ("iters", "warmup", "decay_steps", "lr_min")  # of a run that has begun none of these is open


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Options as they were given, or as a run has kept them. None and auto are open."""

    files: tuple[str, ...]
    data: DataOptions
    train: TrainOptions
    run: RunOptions
    model: ModelOptions = field(default_factory=ModelOptions)
    tune: LoraOptions = field(default_factory=LoraOptions)
    lora: AdapterOptions = field(default_factory=AdapterOptions)
    outs: ExtraOutputOptions = field(default_factory=ExtraOutputOptions)
    preference: PreferenceOptions = field(default_factory=PreferenceOptions)
    command: str = "from-scratch"
    base: str = ""  # the model's file that is tuned, or that a new run takes its first weights from

    @property
    def parts(self) -> dict[str, Any]:
        """Those that the command has."""
        return {name: getattr(self, name) for name in OF[self.command]}

    @property
    def idle(self) -> dict[str, str]:
        """The options that have no effect beside the others, and beside which."""
        found = idle_in(self.train, self.run) | outs.idle(self.command, self.tune.full)
        if not (self.data.val or self.data.val_split):
            found["patience"] = "without --val or --val-split"
        return (
            found
            if self.command == "from-scratch"
            else found | lora_options.idle(self.tune) | preference.idle(self.preference)
        )

    @property
    def adapters(self) -> list[Path]:
        """The files that are read for it."""
        first = [self.tune.lora_init] if self.tune.lora_init else []
        return [*first, *(path for path, _ in self.lora.scaled)]

    def inputs(self, trains: bool = True) -> list[str]:
        """List what a run that goes on reads, as it was named; one that does not train reads no data."""
        base = self.base if self.command == "finetune" and not self.tune.full else ""
        template = self.data.chat_template if not self.data.names_template else None
        models = (base, *(path for path, _ in self.lora.scaled), self.train.teacher)
        data = (*self.files, *self.data.val, template) if trains else ()
        return [str(each) for each in (*models, *data) if each and str(each) != "-"]

    def settled(self, base: str = "") -> "RunConfig":
        """With paths that mean the same from any folder."""
        chosen = self.data.chat_template
        paths = (self.model.vocab_from, self.tune.lora_init, self.tune.peft, chosen, self.train.teacher)
        vocab, first, peft, template, teacher = (path and _whole(path) for path in paths)
        new = self.command == "from-scratch" and not (base or self.base)
        base = self.base or base
        return replace(
            self,
            files=absolute(self.files),
            base=absolute([base])[0] if base else "",
            model=replace(self.model, vocab_from=vocab or (teacher if new else None)),
            train=replace(self.train, teacher=teacher),
            data=replace(
                self.data,
                val=absolute(self.data.val),
                chat_template=chosen if self.data.names_template else template,
                date=self.data.date or (date.today().isoformat() if self.files else ""),
            ),
            tune=replace(self.tune, lora_init=first, peft=peft),
            lora=AdapterOptions((), tuple((_whole(path), scale) for path, scale in self.lora.scaled)),
            outs=self.outs.settled(lambda file: absolute([file])[0]),
        )

    # ---- as JSON -----------------------------------------------------------

    def plain(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        parts = {name: plain(part) for name, part in self.parts.items()}
        parts["data"]["force_reshuffle"] = False  # once is enough
        parts["run"] |= PASSING
        return {"command": self.command, "base": self.base, "files": list(self.files), **parts}

    @classmethod
    def from_plain(cls, kept: Mapping[str, Any], source: object) -> "RunConfig":
        """Of a run that has begun."""
        files, command, base = kept.get("files", []), kept.get("command"), kept.get("base", "")
        parts = {name: kept.get(name, {}) for name in PARTS}
        sound = isinstance(files, list) and all(isinstance(text, str) for text in (*files, command, base))
        if not sound or command not in OF or not all(isinstance(part, dict) for part in parts.values()):
            raise FileError(f"{source}: its options are damaged")
        if unset := [name for name in DECIDED if parts["train"].get(name) is None]:
            raise FileError(f"{source}: its options are damaged: {unset[0]} is not decided")
        try:
            made: dict[str, Any] = {
                name: from_plain(kind, parts[name], source) for name, kind in PARTS.items()
            }
        except UsageError as error:
            raise FileError(str(error)) from None
        made["run"] = replace(made["run"], **PASSING)
        return cls(files=tuple(files), **made, command=str(command), base=base)


def idle_in(options: TrainOptions, run: RunOptions) -> dict[str, str]:
    """The options that have no effect beside the others, and beside which."""
    found = dict.fromkeys(registry.idle(options.optimizer), f"to --optimizer {options.optimizer}")
    if options.schedule == "constant":
        found |= dict.fromkeys(("decay_steps", "restart_growth"), "to --schedule constant")
    if options.teacher is None:
        found["teacher_weight"] = "without --teacher"
    if not options.past:
        found["delta"] = "without --past"
    if not {*run.log} - {"csv"}:
        found["name"] = "without --log to tensorboard, wandb or trackio"
    if not run.eval_every:
        found["patience"] = "to --eval-every 0"
    if not run.sample_every:
        found["sample_prompt"] = "without --sample-every"
    return found


def absolute(files: Sequence[str]) -> tuple[str, ...]:
    """So that a run goes on from any folder."""
    here = os.getcwd()  # noqa: PTH109 - as it is spelt
    homes = {True: glob.escape(here), False: here}  # a pattern stays one, and a folder's name becomes none
    return tuple(
        file if file in ("-", "") else os.path.normpath(Path(homes[glob.has_magic(file)]) / file)
        for file in files
    )


def _whole(path: Path) -> Path:
    return Path(absolute([str(path)])[0])
