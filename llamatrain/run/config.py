"""What was asked of a run, the first of three stages: asked, resolved, fitted."""

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from llamatrain.adapters.options import AdapterOptions
from llamatrain.config.options import OptionSpec, declared, from_plain, plain, unused_options
from llamatrain.data.options import DataOptions
from llamatrain.errors import FileError, UsageError
from llamatrain.model.options import ModelOptions
from llamatrain.optim import registry
from llamatrain.preference.options import PreferenceOptions
from llamatrain.run.extra_output_options import ExtraOutputOptions
from llamatrain.run.lora_options import LoraOptions
from llamatrain.run.options import RunOptions, TrainOptions

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
    def values(self) -> dict[str, Any]:
        """The values of all options by name, with the command and the base."""
        values = {name: value for part in self.parts.values() for name, value in vars(part).items()}
        return values | {"command": self.command, "base": self.base}

    @property
    def unused(self) -> dict[str, str]:
        """The options that have no effect with the others, and why."""
        optimizer = self.train.optimizer
        unused = dict.fromkeys(registry.unused_options(optimizer), f"with --optimizer {optimizer}")
        return unused | unused_options(self.values, *map(type, self.parts.values()))

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
        for part, name, default in transient_options():
            parts[part][name] = default
        return {"command": self.command, "base": self.base, "files": list(self.files), **parts}

    @classmethod
    def from_plain(cls, kept: Mapping[str, Any], source: object) -> "RunConfig":
        """Of a run that has begun."""
        files, command, base = kept.get("files", []), kept.get("command"), kept.get("base", "")
        parts = {name: kept.get(name, {}) for name in PARTS}
        sound = isinstance(files, list) and all(isinstance(text, str) for text in (*files, command, base))
        if not sound or command not in OF or not all(isinstance(part, dict) for part in parts.values()):
            raise FileError(f"{source}: the stored options are damaged", code="damaged-options")
        for part, spec in all_options():
            if spec.option.resolved and parts[part].get(spec.name) is None:
                raise FileError(
                    f"{source}: the stored options are damaged: {spec.name} is not set",
                    code="damaged-options",
                )
        try:
            options: dict[str, Any] = {
                name: from_plain(kind, parts[name], source) for name, kind in PARTS.items()
            }
        except UsageError as error:
            raise FileError(str(error), code=error.code) from None
        for part, name, default in transient_options():
            if part != "data":
                options[part] = replace(options[part], **{name: default})
        return cls(files=tuple(files), **options, command=str(command), base=base)


def all_options() -> Iterator[tuple[str, OptionSpec]]:
    """Yield every option of a run, with the part it belongs to."""
    return ((part, spec) for part, cls in PARTS.items() for spec in declared(cls).values())


def transient_options() -> Iterator[tuple[str, str, Any]]:
    """Yield part, name and default of the options that are not stored with a run."""
    return ((part, spec.name, spec.default) for part, spec in all_options() if spec.option.transient)


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
