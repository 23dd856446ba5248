"""Turns what a user gave on the command line, in a config file or from Python into a request for a run."""

import os
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from llamatrain.adapters.options import AdapterOptions
from llamatrain.config.not_found import missing_model
from llamatrain.config.options import (
    OptionError,
    Options,
    build,
    changed_options,
    format_flag,
    option_specs,
    reject_unused,
    replace_flags,
    with_present_names,
)
from llamatrain.config.remote_names import is_model_name, remote_name
from llamatrain.config.toml import BaseArgument, DataArgument, format_setting, read_config
from llamatrain.contrastive.options import ContrastiveOptions, check_contrastive
from llamatrain.data.options import GRPO, DataOptions
from llamatrain.errors import FileError, UsageError
from llamatrain.gguf.wrong_file import describe_folder
from llamatrain.grpo.options import GrpoOptions, check_grpo
from llamatrain.model.options import BYTES, ModelOptions
from llamatrain.optim import registry
from llamatrain.preference.options import PreferenceOptions, check_compatible
from llamatrain.rewards.options import RewardOptions
from llamatrain.run.config import COMMAND_PARTS, PARTS, RunConfig
from llamatrain.run.extra_output_options import ExtraOutputOptions
from llamatrain.run.hooks import NO_HOOKS, RunHooks, check_hooks
from llamatrain.run.lora_options import NOT_FULL, LoraOptions
from llamatrain.run.options import RunFolderOptions, RunOptions, TrainOptions
from llamatrain.sources.names import can_convert

SINE_VOCAB_SIZES = 3, 1024  # tokens of the sine wave: one to begin with, and levels
ROW_VOCAB_LEAST = 2  # tokens of supplied rows
FROM_SCRATCH_OPTIONS = (ModelOptions, DataOptions, TrainOptions, RunOptions, ExtraOutputOptions)
FINETUNE_OPTIONS = (
    LoraOptions,
    AdapterOptions,
    PreferenceOptions,
    ContrastiveOptions,
    RewardOptions,
    GrpoOptions,
    DataOptions,
    TrainOptions,
    RunOptions,
    ExtraOutputOptions,
)
FINETUNE_DEFAULTS: Mapping[str, Any] = {"batch": 4, "lr": None}  # the rate follows from what is trained

# The options of `from-scratch` without data, for a tiny model of the built-in sine wave;
# configs/sine.toml has the same options.
SINE: dict[str, object] = {
    "embd": 32,
    "head": 4,
    "layer": 2,
    "ctx": 96,
    "vocab_size": "32",
    "iters": 1000,
    "lr": 3e-3,
    "eval_every": 0,
    "save_every": 0,
    "sample_every": 100,
}

Overrides = Mapping[str, Any]  # options by name, without those that were not given


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A valid request for a run, in which every option has an effect."""

    config: RunConfig
    folder_options: RunFolderOptions
    given: Collection[str]  # names of the options that were given
    changed: Collection[str]  # names of those that differ from their defaults
    overrides: Collection[str]  # names of those given directly, not by the config file
    notes: tuple[str, ...] = ()
    hooks: RunHooks = NO_HOOKS

    def with_options(self, values: Overrides) -> "RunRequest":
        """Return the same request with other values of some options."""
        return replace(self, config=self.config.with_values(values))

    @contextmanager
    def naming_sources(self) -> Iterator[None]:
        """Name options in errors as they were given: those from a config file by their keys there."""
        with naming_sources(self.folder_options.config, self.given, self.overrides):
            yield


@contextmanager
def naming_sources(config: Path | None, given: Collection[str], overrides: Collection[str]) -> Iterator[None]:
    """Name options in errors by their keys in the config file, if they come from there."""
    try:
        yield
    except UsageError as error:
        words = error.format if isinstance(error, OptionError) else partial(replace_flags, str(error))
        names = set[str]()
        words(lambda name: names.add(name.removeprefix("no_")) or name)  # type: ignore[func-returns-value]
        if config is None or names & {*overrides} or not names & {*given}:
            raise
        raise UsageError(f"{config}: {words(format_setting)}", code=error.code) from None


def merge_config_file(overrides: Overrides, *classes: type[Options]) -> dict[str, Any]:
    """Return the options of the config file, overridden by those given directly."""
    folder_options = build(RunFolderOptions, overrides)
    return {
        **(read_config(folder_options.config, *classes) if folder_options.config else {}),
        **with_present_names(overrides, *classes),
    }


def latest_or_new(overrides: Overrides, values: Overrides) -> tuple[RunFolderOptions, tuple[str, ...]]:
    """Start a new run, with a note, if --checkpoint-in names a LATEST file that does not exist yet.

    A script that always continues from its LATEST checkpoint finds none the first time.
    """
    folder_options = build(RunFolderOptions, overrides)
    if folder_options.trust and not (folder_options.resume or folder_options.checkpoint_in):
        raise UsageError(
            "--trust has no effect without --resume or --checkpoint-in; leave it out", code="unused-option"
        )
    path, latest = folder_options.checkpoint_in, values.get("fn_latest", ExtraOutputOptions.fn_latest)
    if path is None or latest not in path.name or os.path.lexists(path) or not path.parent.is_dir():
        return folder_options, ()
    return replace(folder_options, checkpoint_in=None), (f"{path} does not exist yet: starting a new run",)


def build_config(
    command: str,
    files: tuple[str, ...],
    base: str,
    values: Overrides,
    changed: Collection[str],
    is_resume: bool,
) -> RunConfig:
    """Build the config of a run.

    For a resumed run, unused options are rejected later, when its own are known.
    """
    parts: dict[str, Any] = {name: build(PARTS[name], values) for name in COMMAND_PARTS[command]}
    config = RunConfig(files=files, command=command, base=base, **parts)
    reject_unused({} if is_resume else config.unused, changed)
    return config


# ---- a new model -----------------------------------------------------------


def request_from_scratch(data: Sequence[str], overrides: Overrides, hooks: RunHooks = NO_HOOKS) -> RunRequest:
    """Return the request for `from-scratch`."""
    values = merge_config_file(overrides, *FROM_SCRATCH_OPTIONS, DataArgument)
    folder_options, notes = latest_or_new(overrides, values)
    given = {*values}
    files = tuple(data or values.get("data", ()))
    changed = changed_options(values, *FROM_SCRATCH_OPTIONS)
    with naming_sources(folder_options.config, given, overrides):
        if hooks.rows is not None:
            reject_data_options(values, "supplied rows")
        elif not (files or folder_options.resume or folder_options.checkpoint_in):
            values = add_sine_defaults(values)
        config = build_config("from-scratch", files, "", values, changed, folder_options.resume is not None)
        check_hooks(hooks, config, given)
        if not (folder_options.resume or folder_options.checkpoint_in):
            check_vocabulary(config.model, bool(files), hooks.rows is not None)
            check_student(config, changed)
        if folder_options.only_write_model and not (folder_options.resume or folder_options.checkpoint_in):
            raise UsageError(
                "--only-write-model needs a checkpoint; name it with --resume or --checkpoint-in",
                code="no-checkpoint",
            )
        if (files or hooks.rows is not None) and config.train.loss == "squared-error":
            raise UsageError(
                "--loss squared-error is for the sine wave only; leave out the option or the data",
                code="sine-only",
            )
    return RunRequest(
        config=config,
        folder_options=folder_options,
        given=given,
        changed=changed,
        overrides={*overrides},
        notes=notes,
        hooks=hooks,
    )


def check_vocabulary(options: ModelOptions, has_text: bool, has_rows: bool) -> None:
    """Raise if the vocabulary cannot have the size that was asked for."""
    from llamatrain.data.tokenizer.new_vocab import LARGEST, SMALLEST

    size, has_bytes = options.vocab_size, has_text or has_rows
    least, most = (
        (SMALLEST, LARGEST) if has_text else (ROW_VOCAB_LEAST, LARGEST) if has_rows else SINE_VOCAB_SIZES
    )
    if options.vocab_from or (has_bytes if size == BYTES else least <= int(size) <= most):
        return
    takes = f"{least} to {most}, or {BYTES}" if has_bytes else f"{least} to {most} for the sine wave"
    raise OptionError(
        lambda spelt: f"{spelt('vocab_size')} must be {takes} (got {size})", code="invalid-option"
    )


def check_student(config: RunConfig, changed: Collection[str]) -> None:
    """Raise unless a new model with a teacher has text and takes the teacher's vocabulary."""
    if config.train.teacher is None:
        return
    if not config.files:
        raise UsageError(
            "--teacher has no effect on the built-in sine wave; name the data, or leave it out",
            code="unused-option",
        )
    if "vocab_size" in changed:
        raise UsageError(
            "--vocab-size has no effect with --teacher, whose vocabulary is used; leave it out",
            code="unused-option",
        )


def reject_data_options(values: Overrides, source: str) -> None:
    """Raise if an option is about data, which a run does not read."""
    for name, spec in option_specs(DataOptions).items():
        if name in values and spec.check(values[name]) != spec.default:
            option = f"no_{name}" if values[name] is False else name
            raise OptionError(
                lambda spelt, name=option: (
                    f"{spelt(name)} has no effect on {source}; name the data, or leave it out"
                )  # type: ignore[misc]
            )


def add_sine_defaults(values: Overrides) -> dict[str, Any]:
    """Return the options with the defaults of the sine wave; raise if one of them is about data."""
    reject_data_options(values, "the built-in sine wave")
    sized = ("embd", "head", "layer") if "size" in values else ()
    counted = ("iters",) if "epochs" in values else ()
    return {**{name: value for name, value in SINE.items() if name not in (*sized, *counted)}, **values}


# ---- a model that is there -------------------------------------------------


def request_finetune(
    base: str | None, data: Sequence[str], overrides: Overrides, hooks: RunHooks = NO_HOOKS
) -> RunRequest:
    """Return the request for `finetune`."""
    values = merge_config_file(overrides, *FINETUNE_OPTIONS, BaseArgument)
    folder_options, notes = latest_or_new(overrides, values)
    base_in_file = None if folder_options.checkpoint_in else values.get("base")
    if base and base_in_file and Path(base).exists() and not is_model(base):
        data, base = [base, *data], None
    files = tuple(data or values.get("data", ()))
    changed = changed_options(values, *FINETUNE_OPTIONS, **finetune_defaults(values))
    with naming_sources(folder_options.config, {*values}, overrides):
        if hooks.rows is not None:
            reject_data_options(values, "supplied rows")
        config, folder_options = build_finetune_config(
            base or base_in_file, files, values, changed, folder_options, hooks
        )
        check_hooks(hooks, config, {*values})
    return RunRequest(
        config=config,
        folder_options=folder_options,
        given={*values},
        changed=changed,
        overrides={*overrides},
        notes=notes,
        hooks=hooks,
    )


def finetune_defaults(values: Overrides) -> dict[str, Any]:
    """Return the defaults of `finetune` that are not those of all commands; some follow from other options."""
    if values.get("objective") == GRPO:  # a step has the answers to one prompt
        return {**FINETUNE_DEFAULTS, "batch": values.get("num_generations", GrpoOptions.num_generations)}
    return {**FINETUNE_DEFAULTS}


def build_finetune_config(
    base: str | None,
    data: tuple[str, ...],
    values: Overrides,
    changed: set[str],
    folder_options: RunFolderOptions,
    hooks: RunHooks,
) -> tuple[RunConfig, RunFolderOptions]:
    """Build the config of `finetune`, and check that there are a base and data unless a resumed run has them.

    A model given as --checkpoint-in is a base that is trained as a whole.
    """
    from llamatrain.gguf.reader import open_gguf

    if folder_options.checkpoint_in and open_gguf(folder_options.checkpoint_in).kind != "checkpoint":
        check_single_model(base, changed, folder_options)
        base, data = str(folder_options.checkpoint_in), (base, *data) if base else data
        folder_options, values = replace(folder_options, checkpoint_in=None), {**values, "full": True}
    elif (
        base
        and (folder_options.resume or folder_options.checkpoint_in)
        and Path(base).exists()
        and not is_model(base)
    ):
        data, base = (base, *data), None  # the base need not be named again
    if not folder_options.resume and not folder_options.checkpoint_in:
        for name, product in (("only_write_lora", "adapter"), ("only_write_model", "model")):
            if values.get(name):
                raise UsageError(
                    f"{format_flag(name)} writes the {product} of a checkpoint; name it with --resume "
                    "or --checkpoint-in",
                    code="no-checkpoint",
                )
        if not base:
            raise UsageError("no model given; name a GGUF file, and the data to train on", code="no-model")
    check_model(base, data)
    is_new = not folder_options.resume and not folder_options.checkpoint_in
    if base and not data and hooks.rows is None and is_new:
        raise UsageError(
            f"no data given to train {base}; name files (text, JSON, CSV, Parquet), folders, globs, or -",
            code="no-data",
        )
    values = {**finetune_defaults(values), **values}
    config = build_config("finetune", data, base or "", values, changed, folder_options.resume is not None)
    if config.train.loss != "cross-entropy":
        raise UsageError("--loss squared-error is for the sine wave only; leave it out", code="sine-only")
    train = config.train
    check_compatible(config.preference, train.optimizer, config.tune.full, train.batch, config.data.pack)
    if config.preference.is_contrastive:
        check_contrastive(train.batch * train.grad_acc, config.tune.lora_dropout)
    if not folder_options.resume:
        check_rewards(config)
    if registry.get_optimizer(train.optimizer).full_models_only and not config.tune.full:
        problem = f"{train.optimizer} needs whole matrices; add --full, or use adamw for an adapter"
        raise OptionError(lambda spelt: f"{spelt('optimizer')} {problem}", code="needs-full-model")
    return config, folder_options


def check_rewards(config: RunConfig) -> None:
    """Raise if there are rewards without GRPO, or if its options do not fit each other."""
    train, rewards = config.train, config.rewards.reward
    if not config.preference.is_grpo:
        if rewards:
            raise OptionError(
                lambda spelt: (
                    f"{spelt('reward')} has no effect without {spelt('objective')} {GRPO}; add it, or leave it out"
                ),
                code="unused-option",
            )
        return
    check_grpo(
        config.grpo,
        rewards=len(rewards),
        rows=train.batch * train.grad_acc,
        beta=config.preference.beta,
        full=config.tune.full,
        dropout=config.tune.lora_dropout,
    )
    if train.teacher:
        raise OptionError(
            lambda spelt: f"{spelt('teacher')} has no effect with {spelt('objective')} {GRPO}; leave it out",
            code="unused-option",
        )


def check_model(base: str | None, data: Sequence[str], command: str = "finetune") -> None:
    """Raise if the first argument is no model, before anything else is read."""
    if base is None or is_model(base):
        return
    if model := next((name for name in data if is_model(name)), None):
        rest = shlex.join([base, *(name for name in data if name != model)])
        raise UsageError(
            f"the model must come first (got {base}): llamatrain {command} {shlex.quote(model)} {rest}",
            code="model-first",
        )
    if remote_name(base):
        return
    if Path(base).is_dir():
        raise FileError(describe_folder(Path(base)), code="is-a-folder")
    if not Path(base).exists():
        raise missing_model(Path(base))


def check_single_model(base: str | None, changed: set[str], folder_options: RunFolderOptions) -> None:
    """Raise if --checkpoint-in names a model and there is another one, or an option about adapters."""
    if base and is_model(base):
        raise UsageError(
            f"two models given: --checkpoint-in {folder_options.checkpoint_in} and {base}; leave one of "
            "them out",
            code="two-models",
        )
    specs = option_specs(LoraOptions) | option_specs(AdapterOptions)
    if lora := sorted(name for name in changed if name in specs and NOT_FULL in specs[name].option.when):
        raise UsageError(
            f"{format_flag(lora[0])} has no effect with a model as --checkpoint-in, which trains all of "
            "it; name the model first to train an adapter",
            code="unused-option",
        )


def is_model(path: str) -> bool:
    """Return True if a path is one of a model: a GGUF file, a folder that can be converted, or a remote name."""
    from llamatrain.gguf.constants import MAGIC
    from llamatrain.gguf.reader import other_formats

    if name := remote_name(path):
        return is_model_name(name)
    if can_convert(Path(path)):
        return True
    with suppress(OSError):
        if Path(path).is_file():  # a pipe would wait for a writer
            with Path(path).open("rb") as file:
                return file.read(len(MAGIC)) in (MAGIC, *other_formats())
    return False
