"""The options of a run, as they were given or as a checkpoint stores them."""

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamatrain.adapters.options import AdapterOptions
from llamatrain.config.options import OptionSpec, from_plain, option_specs, plain, unused_options
from llamatrain.config.remote_names import remote_name
from llamatrain.contrastive.options import ContrastiveOptions
from llamatrain.data.options import DataOptions
from llamatrain.errors import FileError, UsageError
from llamatrain.grpo.options import GrpoOptions
from llamatrain.model.options import ModelOptions
from llamatrain.optim import registry
from llamatrain.preference.options import PreferenceOptions
from llamatrain.rewards.options import RewardOptions
from llamatrain.run.extra_output_options import ExtraOutputOptions
from llamatrain.run.lora_options import LoraOptions
from llamatrain.run.options import RunOptions, TrainOptions

if TYPE_CHECKING:
    from llamatrain.grpo.settings import Grpo

PARTS = {
    "model": ModelOptions,
    "data": DataOptions,
    "train": TrainOptions,
    "run": RunOptions,
    "tune": LoraOptions,
    "lora": AdapterOptions,
    "outs": ExtraOutputOptions,
    "preference": PreferenceOptions,
    "contrastive": ContrastiveOptions,
    "rewards": RewardOptions,
    "grpo": GrpoOptions,
}
FINETUNE_PARTS = (
    "data",
    "train",
    "run",
    "tune",
    "preference",
    "contrastive",
    "rewards",
    "grpo",
    "lora",
    "outs",
)
# the option classes of each command
COMMAND_PARTS = {"from-scratch": ("model", "data", "train", "run", "outs"), "finetune": FINETUNE_PARTS}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The options of a run. None and "auto" are still open."""

    files: tuple[str, ...]
    data: DataOptions
    train: TrainOptions
    run: RunOptions
    model: ModelOptions = field(default_factory=ModelOptions)
    tune: LoraOptions = field(default_factory=LoraOptions)
    lora: AdapterOptions = field(default_factory=AdapterOptions)
    outs: ExtraOutputOptions = field(default_factory=ExtraOutputOptions)
    preference: PreferenceOptions = field(default_factory=PreferenceOptions)
    contrastive: ContrastiveOptions = field(default_factory=ContrastiveOptions)
    rewards: RewardOptions = field(default_factory=RewardOptions)
    grpo: GrpoOptions = field(default_factory=GrpoOptions)
    command: str = "from-scratch"
    base: str = ""  # the model's file that is tuned, or that a new run takes its first weights from

    @property
    def parts(self) -> dict[str, Any]:
        """The option classes of the command, by name."""
        return {name: getattr(self, name) for name in COMMAND_PARTS[self.command]}

    @property
    def values(self) -> dict[str, Any]:
        """The values of all options by name, with the command and the base."""
        values = {name: value for part in self.parts.values() for name, value in vars(part).items()}
        return values | {"command": self.command, "base": self.base}

    def with_values(self, values: Mapping[str, Any]) -> "RunConfig":
        """Return the same config with other values of some options."""
        parts = {}
        for name, part in self.parts.items():
            parts[name] = replace(
                part, **{option: values[option] for option in option_specs(type(part)) if option in values}
            )
        return replace(self, **parts)

    @property
    def unused(self) -> dict[str, str]:
        """The options that have no effect with the others, and why."""
        optimizer = self.train.optimizer
        unused = dict.fromkeys(registry.unused_options(optimizer), f"with --optimizer {optimizer}")
        return unused | unused_options(self.values, *map(type, self.parts.values()))

    @property
    def grpo_settings(self) -> "Grpo | None":
        """The settings of GRPO, or None for another objective."""
        return self.grpo.settings(self.preference.beta) if self.preference.is_grpo else None

    @property
    def adapters(self) -> list[Path]:
        """The adapter files that the run reads."""
        first = [self.tune.lora_init] if self.tune.lora_init else []
        return [*first, *(path for path, _ in self.lora.scaled)]

    def inputs(self, trains: bool = True) -> list[str]:
        """Return the files that a resumed run reads, as the user named them.

        Without training it reads no data.
        """
        base = self.base if self.command == "finetune" and not self.tune.full else ""
        template = self.data.chat_template if not self.data.is_named_template else None
        models = (base, *(path for path, _ in self.lora.scaled), self.train.teacher)
        data = (*self.files, *self.data.val, *self.data.retain_data, template) if trains else ()
        return [
            str(name)
            for name in (*models, *data, *(self.rewards.reward if trains else ()))
            if name and str(name) != "-"
        ]

    def make_absolute(self, base: str = "") -> "RunConfig":
        """Return the same options with absolute paths, so that the run can be resumed from any folder."""
        template_option = self.data.chat_template
        paths = (
            self.model.vocab_from,
            self.tune.lora_init,
            self.tune.peft,
            template_option,
            self.train.teacher,
        )
        vocab, lora_init, peft, template, teacher = (path and _absolute(path) for path in paths)
        new = self.command == "from-scratch" and not (base or self.base)
        base = self.base or base
        return replace(
            self,
            files=make_absolute(self.files),
            base=make_absolute([base])[0] if base else "",
            model=replace(self.model, vocab_from=vocab or (teacher if new else None)),
            train=replace(self.train, teacher=teacher),
            data=replace(
                self.data,
                val=make_absolute(self.data.val),
                retain_data=make_absolute(self.data.retain_data),
                chat_template=template_option if self.data.is_named_template else template,
                date=self.data.date or (date.today().isoformat() if self.files else ""),
            ),
            tune=replace(self.tune, lora_init=lora_init, peft=peft),
            rewards=self.rewards.make_absolute(lambda file: make_absolute([file])[0]),
            lora=AdapterOptions((), tuple((_absolute(path), scale) for path, scale in self.lora.scaled)),
            outs=self.outs.make_absolute(lambda file: make_absolute([file])[0]),
        )

    # ---- as JSON -----------------------------------------------------------

    def plain(self) -> dict[str, Any]:
        """Return the options as JSON values, as a checkpoint stores them."""
        parts = {name: plain(part) for name, part in self.parts.items()}
        for part, name, default in transient_options():
            if part in parts:
                parts[part][name] = default
        return {"command": self.command, "base": self.base, "files": list(self.files), **parts}

    @classmethod
    def from_plain(cls, stored: Mapping[str, Any], source: object) -> "RunConfig":
        """Make a config from the options in a checkpoint, which may be damaged."""
        files, command, base = stored.get("files", []), stored.get("command"), stored.get("base", "")
        parts = {name: stored.get(name, {}) for name in PARTS}
        is_valid = isinstance(files, list) and all(isinstance(text, str) for text in (*files, command, base))
        if (
            not is_valid
            or command not in COMMAND_PARTS
            or not all(isinstance(part, dict) for part in parts.values())
        ):
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
    return ((part, spec) for part, cls in PARTS.items() for spec in option_specs(cls).values())


def transient_options() -> Iterator[tuple[str, str, Any]]:
    """Yield part, name and default of the options that are not stored with a run."""
    return ((part, spec.name, spec.default) for part, spec in all_options() if spec.option.transient)


def make_absolute(files: Sequence[str]) -> tuple[str, ...]:
    """Return absolute paths; glob patterns stay patterns."""
    here = os.getcwd()  # noqa: PTH109 - as it is spelt
    homes = {True: glob.escape(here), False: here}  # a pattern stays one, and a folder's name becomes none
    return tuple(
        remote_name(file) or file
        if file in ("-", "") or remote_name(file)
        else os.path.normpath(Path(homes[glob.has_magic(file)]) / file)
        for file in files
    )


def _absolute(path: Path) -> Path:
    return Path(make_absolute([str(path)])[0])
