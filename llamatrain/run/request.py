"""What a user said, on a command line, in a file of `--config` or from Python, as a run that can be begun."""

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
    altered,
    build,
    declared,
    flag_of,
    reject_unused,
    respelt,
    with_present_names,
)
from llamatrain.config.toml import BaseArgument, DataArgument, read_config, told_there
from llamatrain.data.options import DataOptions
from llamatrain.errors import FileError, UsageError
from llamatrain.gguf.wrong_file import describe_folder
from llamatrain.model.options import BYTES, ModelOptions
from llamatrain.optim import registry
from llamatrain.preference.options import PreferenceOptions, check_compatible
from llamatrain.run.config import OF, PARTS, RunConfig
from llamatrain.run.extra_output_options import ExtraOutputOptions
from llamatrain.run.lora_options import NOT_FULL, LoraOptions
from llamatrain.run.options import RunFolderOptions, RunOptions, TrainOptions
from llamatrain.run.sine_demo import SINE

WAVE = 3, 1024  # tokens of the sine wave: one to begin with, and levels
NEW = (ModelOptions, DataOptions, TrainOptions, RunOptions, ExtraOutputOptions)
TUNING = (
    LoraOptions,
    AdapterOptions,
    PreferenceOptions,
    DataOptions,
    TrainOptions,
    RunOptions,
    ExtraOutputOptions,
)
TUNING_DEFAULTS = {"batch": 4, "lr": 1e-4}

Said = Mapping[str, Any]  # options by name, without those that are left to their defaults


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """None of its options is without effect."""

    asked: RunConfig
    place: RunFolderOptions
    given: Collection[str]  # the names of the options that were given
    altered: Collection[str]  # and of those of them that are not at their defaults
    said: Collection[str]  # and of those of them that are not from a file
    notes: tuple[str, ...] = ()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """What options cannot be is told as they were given: those of a file by their names there."""
        with told_of(self.place.config, self.given, self.said):
            yield


@contextmanager
def told_of(config: Path | None, given: Collection[str], said: Collection[str]) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        words, names = (
            error.words if isinstance(error, OptionError) else partial(respelt, str(error)),
            set[str](),
        )
        words(lambda name: names.add(name.removeprefix("no_")) or name)  # type: ignore[func-returns-value]
        if config is None or names & {*said} or not names & {*given}:
            raise
        raise UsageError(f"{config}: {words(told_there)}") from None


def given_options(said: Said, *classes: type[Options]) -> dict[str, Any]:
    """What the config file says under what was said beside it."""
    place = build(RunFolderOptions, said)
    return {
        **(read_config(place.config, *classes) if place.config else {}),
        **with_present_names(said, *classes),
    }


def gone_on_from(said: Said, values: Said) -> tuple[RunFolderOptions, tuple[str, ...]]:
    """A script that goes on from its LATEST each time finds none the first time."""
    place = build(RunFolderOptions, said)
    if place.trust and not (place.resume or place.checkpoint_in):
        raise UsageError(
            "--trust is for the files that a checkpoint names: name it with --resume or --checkpoint-in"
        )
    path, latest = place.checkpoint_in, values.get("fn_latest", ExtraOutputOptions.fn_latest)
    if path is None or latest not in path.name or os.path.lexists(path) or not path.parent.is_dir():
        return place, ()
    return replace(place, checkpoint_in=None), (f"{path} is not there: the run begins anew",)


def asked_of(
    command: str, files: tuple[str, ...], base: str, values: Said, altered: Collection[str], goes_on: bool
) -> RunConfig:
    """What has no effect beside the options of a run that goes on is seen where they are known."""
    parts: dict[str, Any] = {name: build(PARTS[name], values) for name in OF[command]}
    options = RunConfig(files=files, command=command, base=base, **parts)
    reject_unused({} if goes_on else options.unused, altered)
    return options


# ---- a new model -----------------------------------------------------------


def new_model(data: Sequence[str], said: Said) -> RunRequest:
    values = given_options(said, *NEW, DataArgument)
    place, notes = gone_on_from(said, values)
    given, files, other = {*values}, tuple(data or values.get("data", ())), altered(values, *NEW)
    with told_of(place.config, given, said):
        if not (files or place.resume or place.checkpoint_in):
            values = of_the_sine_wave(values)
        options = asked_of("from-scratch", files, "", values, other, place.resume is not None)
        if not (place.resume or place.checkpoint_in):
            check_vocabulary(options.model, bool(files))
            check_pupil(options, other)
        if place.only_write_model and not (place.resume or place.checkpoint_in):
            raise UsageError(
                "--only-write-model writes the model of a checkpoint: name it with --resume or --checkpoint-in"
            )
        if files and options.train.loss == "squared-error":
            raise UsageError(
                "--loss squared-error is for the sine wave only; leave the data out, or the option"
            )
    return RunRequest(asked=options, place=place, given=given, altered=other, said={*said}, notes=notes)


def check_vocabulary(options: ModelOptions, of_text: bool) -> None:
    from llamatrain.data.tokenizer.new_vocab import LARGEST, SMALLEST

    size, (least, most) = options.vocab_size, (SMALLEST, LARGEST) if of_text else WAVE
    if options.vocab_from or (of_text if size == BYTES else least <= int(size) <= most):
        return
    takes = (
        f"a text takes {least} to {most}, or the word {BYTES}"
        if of_text
        else f"the sine wave takes {least} to {most}"
    )
    raise OptionError(lambda spelt: f"{spelt('vocab_size')} {size} cannot be; {takes}")


def check_pupil(options: RunConfig, altered: Collection[str]) -> None:
    """A new model that is taught has text to read, and its teacher's vocabulary."""
    if options.train.teacher is None:
        return
    if not options.files:
        raise UsageError("--teacher means nothing to the built-in sine wave; name the data, or leave it out")
    if "vocab_size" in altered:
        raise UsageError(
            "--vocab-size has no effect beside --teacher, whose vocabulary a new model takes; leave it out"
        )


def of_the_sine_wave(values: Said) -> dict[str, Any]:
    """With its own defaults; of the options of data none says more than that there is none."""
    for name, each in declared(DataOptions).items():
        if name in values and each.checked(values[name]) != each.default:
            said = f"no_{name}" if values[name] is False else name
            raise OptionError(
                lambda spelt, said=said: (
                    f"{spelt(said)} means nothing to the built-in sine wave; name the data, or leave it out"
                )  # type: ignore[misc]
            )
    sized = ("embd", "head", "layer") if "size" in values else ()
    counted = ("iters",) if "epochs" in values else ()
    return {**{name: value for name, value in SINE.items() if name not in (*sized, *counted)}, **values}


# ---- a model that is there -------------------------------------------------


def tuning(base: str | None, data: Sequence[str], said: Said) -> RunRequest:
    values = given_options(said, *TUNING, BaseArgument)
    place, notes = gone_on_from(said, values)
    named_there = None if place.checkpoint_in else values.get("base")
    if base and named_there and Path(base).exists() and not is_gguf(base):
        data, base = [base, *data], None
    files = tuple(data or values.get("data", ()))
    other = altered(values, *TUNING, **TUNING_DEFAULTS)
    with told_of(place.config, {*values}, said):
        asked, place = named(base or named_there, files, {**TUNING_DEFAULTS, **values}, other, place)
    return RunRequest(asked=asked, place=place, given={*values}, altered=other, said={*said}, notes=notes)


def named(
    base: str | None, data: tuple[str, ...], values: Said, altered: set[str], place: RunFolderOptions
) -> tuple[RunConfig, RunFolderOptions]:
    """With a base and data, unless a run goes on that has them. A model as --checkpoint-in is a base that is trained whole."""
    from llamatrain.gguf.reader import open_gguf

    if place.checkpoint_in and open_gguf(place.checkpoint_in).kind != "checkpoint":
        check_whole(base, altered, place)
        base, data = str(place.checkpoint_in), (base, *data) if base else data
        place, values = replace(place, checkpoint_in=None), {**values, "full": True}
    elif base and (place.resume or place.checkpoint_in) and Path(base).exists() and not is_gguf(base):
        data, base = (base, *data), None  # the base need not be named again
    if not place.resume and not place.checkpoint_in:
        for name, made in (("only_write_lora", "adapter"), ("only_write_model", "model")):
            if values.get(name):
                raise UsageError(
                    f"{flag_of(name)} writes the {made} of a checkpoint: name it with --resume or --checkpoint-in"
                )
        if not base:
            raise UsageError("no model: name a GGUF file, and the data to train on")
    check_model(base, data)
    if base and not data and not place.resume and not place.checkpoint_in:
        raise UsageError(
            f"no data to train {base} on: name files (text, JSON, CSV, Parquet), folders, globs, or -"
        )
    options = asked_of("finetune", data, base or "", values, altered, place.resume is not None)
    if options.train.loss != "cross-entropy":
        raise UsageError("--loss squared-error is for the sine wave only")
    train = options.train
    check_compatible(options.preference, train.optimizer, options.tune.full, train.batch, options.data.pack)
    if registry.named(train.optimizer).whole and not options.tune.full:
        told = f"{train.optimizer} is for whole matrices: --full trains those, an adapter takes adamw"
        raise OptionError(lambda spelt: f"{spelt('optimizer')} {told}")
    return options, place


def check_model(base: str | None, data: Sequence[str], command: str = "finetune") -> None:
    """What comes first is a model, before anything is read of what follows."""
    if base is None or is_gguf(base):
        return
    if model := next((each for each in data if is_gguf(each)), None):
        rest = shlex.join([base, *(each for each in data if each != model)])
        raise UsageError(
            f"{base} is no model, and {model} is one, which comes first: llamatrain {command} {shlex.quote(model)} {rest}"
        )
    if Path(base).is_dir():
        raise FileError(describe_folder(Path(base)))
    if not Path(base).exists():
        raise missing_model(Path(base))


def check_whole(base: str | None, altered: set[str], place: RunFolderOptions) -> None:
    """There is one model, and it gets no adapter."""
    if base and is_gguf(base):
        raise UsageError(
            f"--checkpoint-in {place.checkpoint_in} is a model, as {base} is; leave one of them out"
        )
    specs = declared(LoraOptions) | declared(AdapterOptions)
    if lora := sorted(name for name in altered if name in specs and NOT_FULL in specs[name].option.when):
        raise UsageError(
            f"--checkpoint-in trains all of a model, and {flag_of(lora[0])} is for an adapter: name the model first"
        )


def is_gguf(path: str) -> bool:
    from llamatrain.gguf.constants import MAGIC
    from llamatrain.gguf.legacy import KINDS

    with suppress(OSError):
        if Path(path).is_file():  # a pipe would wait for a writer
            with Path(path).open("rb") as file:
                return file.read(len(MAGIC)) in (MAGIC, *KINDS)
    return False
