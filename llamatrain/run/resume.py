"""Resumes a run: finds its checkpoint, and merges its options with those that may change."""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llamatrain.checkpoints.checkpoint import KERNELS, Checkpoint
from llamatrain.checkpoints.run_folder import RunFolder
from llamatrain.checkpoints.signature import SIGNATURE, is_own
from llamatrain.config.messages import LINE, shorten
from llamatrain.config.not_found import missing_file
from llamatrain.config.options import format_flag, option_specs, reject_unused
from llamatrain.data.find_files import check_saved_names
from llamatrain.distributed.comm import get_comm, get_launch_info
from llamatrain.engine.device import kernel_class
from llamatrain.errors import FileError, UsageError
from llamatrain.gguf.reader import open_gguf
from llamatrain.platform.terminal import log_line
from llamatrain.run.config import COMMAND_PARTS, PARTS, RunConfig
from llamatrain.run.in_memory_rows import find_moved
from llamatrain.run.lora_options import NEW_ADAPTER, LoraOptions
from llamatrain.run.options import AUTO, RunFolderOptions, TrainOptions

COMMANDS = {"train_model": "from-scratch", "finetune_lora": "finetune"}  # for checkpoints without options
LEGACY_ADAPTER = "this checkpoint of llama.cpp's finetune names neither model nor data; resume it with"
MAX_COUNT = 1 << 62  # most steps, samples or tokens
MAX_LISTED, PATH = 4, 120  # files of a checkpoint from elsewhere in one message, and the characters of each


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint from which a run is resumed."""

    checkpoint: Checkpoint
    path: Path
    # True if this user wrote it. Files that someone else's checkpoint names are not read or written, unless
    # the user asks for it.
    is_own: bool = True
    notes: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return self.checkpoint.state.counters.step

    @property
    def has_options(self) -> bool:
        """True if the checkpoint stores its options. Those of llama.cpp's programs do not."""
        return bool(self.checkpoint.options)


def find_checkpoint(folder_options: RunFolderOptions, command: str) -> ResumePoint | None:
    """Return the checkpoint to resume from, which must be of this command, or None."""
    path = folder_options.resume or folder_options.checkpoint_in
    if path is None or (not folder_options.resume and open_gguf(path).kind != "checkpoint"):
        return None
    if not path.exists():
        raise missing_file(path)
    checkpoint, checkpoint_path, notes = RunFolder.read_newest(path)
    stored_command = checkpoint.options.get("command", COMMANDS.get(checkpoint.kind))
    if stored_command != command:
        if stored_command not in list(COMMAND_PARTS):
            raise FileError(
                f"{checkpoint_path}: the checkpoint names an unknown command (got {stored_command!r:.40})",
                code="damaged-checkpoint",
            )
        if stored_command == "finetune" and not checkpoint.options:
            raise UsageError(
                f"{checkpoint_path}: {LEGACY_ADAPTER} llamatrain finetune BASE.gguf DATA "
                f"--checkpoint-in {path}",
                code="legacy-checkpoint",
            )
        raise UsageError(
            f"{checkpoint_path}: this is a checkpoint of {stored_command}; use llamatrain "
            f"{stored_command} --resume {path}",
            code="wrong-command",
        )
    counts = vars(checkpoint.state.counters).values()
    if max(counts) >= MAX_COUNT:
        raise FileError(
            f"{checkpoint_path}: the counters are damaged (got {max(counts)})", code="damaged-checkpoint"
        )
    is_own_checkpoint = get_comm().broadcast(is_own(checkpoint.options, checkpoint.extra.get(SIGNATURE)))
    return ResumePoint(checkpoint, checkpoint_path, is_own_checkpoint, tuple(notes))


def apply_resume(
    config: RunConfig, resume_point: ResumePoint, given: Collection[str], changed_names: Collection[str]
) -> tuple[RunConfig, list[str]]:
    """Return the options of a resumed run, with the changes that are allowed, and notes about them."""
    if not resume_point.has_options:
        check_legacy_options(config, resume_point, changed_names)
        reject_unused(config.unused, changed_names)
        return config, []
    stored = RunConfig.from_plain(resume_point.checkpoint.options, resume_point.path)
    config = config.make_absolute()
    folder = resume_point.path.parent
    named = (*config.files, *config.data.val, *config.data.retain_data)
    stored = replace(
        stored,
        files=find_named(find_moved(stored.files, folder), named),
        data=replace(
            stored.data,
            val=find_named(find_moved(stored.data.val, folder), named),
            retain_data=find_named(find_moved(stored.data.retain_data, folder), named),
        ),
    )
    if stored.tune.base_precision == "auto":  # older checkpoints know no other than --precision
        stored = replace(stored, tune=replace(stored.tune, base_precision="same"))
    check_files(stored, config)
    changed, notes = merge_changes(stored, config, given)
    if "cache_base" not in given and (kind := unusable_copies(stored, changed)):
        changed["tune"]["cache_base"] = "off"
        notes.append(f"--cache-base is now off, since {kind} copies are for {kind} products")
    changed["train"].setdefault("grad_groups", resumed_groups(stored.train))
    if (
        not resume_point.is_own
        and "log" not in given
        and (services := sorted({*stored.run.log} - {"csv", "tensorboard"}))
    ):
        changed["run"]["log"] = tuple(logger for logger in stored.run.log if logger not in services)
        notes.append(
            f"nothing is sent to {', '.join(services)}, since only someone else's checkpoint asks for "
            f"it; add --log {services[0]} to send it"
        )
    parts = {part: replace(getattr(stored, part), **values) for part, values in changed.items()}
    merged = replace(stored, base=config.base or stored.base, **parts)  # the base may have been moved
    # old checkpoints know no day
    merged = replace(merged, data=replace(merged.data, date=stored.data.date or config.data.date))
    reject_unused(merged.unused, changed_names)
    if (
        "iters" in changed["train"]
        and stored.train.schedule != "constant"
        and "schedule" not in merged.unused
    ):
        notes.append(describe_schedule_change(stored.train, merged.train, resume_point.step))
    old_kernels, kernels = resume_point.checkpoint.extra.get(KERNELS), kernel_class(merged.train.processor)
    if old_kernels not in (None, kernels):
        notes.append(f"the kernels are now those for {kernels} (they were for {old_kernels!s:.40})")
    regrouped = (merged.train.grad_groups is None and get_launch_info() is not None) or (
        merged.train.grad_groups or 1
    ) != (stored.train.grad_groups or 1)
    if regrouped and "grad_groups" not in given:
        notes.append(
            f"a step now has more gradient groups, for {get_comm().size} ranks (it had "
            f"{stored.train.grad_groups or 1})"
        )
    if (
        "precision" in changed["train"]
        or "base_precision" in changed["tune"]
        or ("bf16" in (stored.tune.cache_base, merged.tune.cache_base) and "cache_base" in changed["tune"])
        or old_kernels not in (None, kernels)
        or regrouped
    ):
        notes.append("results will differ slightly from those of an uninterrupted run")
    return merged, notes


def find_named(files: Sequence[str], named: Collection[str]) -> tuple[str, ...]:
    """Return the files of a run; a missing one is replaced by one of the same name from the command line.

    Its contents are compared later: if they differ, the data starts over.
    """
    by_name = {Path(file).name: file for file in named}
    return tuple(file if Path(file).exists() else by_name.get(Path(file).name, file) for file in files)


def unusable_copies(stored: RunConfig, changed: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the kind of the base's copies if the changed options have no use for them, else an empty string."""
    cache, train, tune = stored.tune.cache_base, changed["train"], changed["tune"]
    is_int8 = tune.get("base_precision", stored.tune.base_precision) == "int8"
    if cache == "bf16":
        return cache if is_int8 or train.get("precision") == "f32" else ""
    is_usable = is_int8 and train.get("processor", stored.train.processor) == "cpu"
    return cache if cache == "int8" and not is_usable else ""


def resumed_groups(stored: TrainOptions) -> int | None:
    """Return the stored number of gradient groups, or None if there are now more ranks than groups."""
    groups = stored.grad_groups or 1
    return None if get_comm().size > groups else groups if get_launch_info() else stored.grad_groups


def describe_schedule_change(stored: TrainOptions, merged: TrainOptions, step: int) -> str:
    """Describe what happens to the learning rate if there are more steps."""
    if merged.schedule != "wsd":
        return (
            f"the schedule does not change: after step {stored.iters} the learning rate stays at "
            f"--lr-min {stored.lr_min:g}"
        )
    fall_start = (stored.iters or 0) - (stored.decay_steps or 0) + 1
    rises = f"; it was already falling since step {fall_start}, and rises again" if step >= fall_start else ""
    return f"the learning rate falls in the last {merged.decay_steps} of {merged.iters} steps{rises}"


def check_legacy_options(
    config: RunConfig, resume_point: ResumePoint, changed_names: Collection[str]
) -> None:
    """Raise unless the base and data of a llama.cpp adapter checkpoint are given.

    Options that the checkpoint decides must not be given.
    """
    if config.command != "finetune":
        return
    if not config.base or not (config.files or config.tune.only_write_lora):
        raise UsageError(
            f"{resume_point.path}: {LEGACY_ADAPTER} llamatrain finetune BASE.gguf DATA --checkpoint-in "
            f"{resume_point.path}",
            code="legacy-checkpoint",
        )
    new = (name for name, spec in option_specs(LoraOptions).items() if NEW_ADAPTER in spec.option.when)
    if unused := [name for name in ("full", "lora_init", *new) if name in changed_names]:
        raise UsageError(
            f"{format_flag(unused[0])} has no effect on the adapter in {resume_point.path}; leave it out",
            code="unused-option",
        )


def check_files(stored: RunConfig, config: RunConfig) -> None:
    """Raise if a resumed run is given other data or another base."""
    if config.files and config.files != stored.files:
        before = shorten(" ".join(stored.files), LINE) or "the sine wave"
        raise UsageError(
            f"the data must stay the same when a run is resumed (it is {before}); leave it out",
            code="fixed-option",
        )
    if config.base and config.base != stored.base and stored.tune.full:
        raise UsageError(
            f"a --full run is resumed from its checkpoint (got the base {config.base}); leave the base out",
            code="fixed-option",
        )
    named = {*config.files, *config.data.val, *config.data.retain_data}  # paths as the user gave them
    saved = (*stored.files, *stored.data.val, *stored.data.retain_data)
    check_saved_names([name for name in saved if name not in named])
    if "-" in stored.files and sys.stdin.isatty():
        raise UsageError("the run's data came from standard input; pipe it in again", code="no-data")


def check_inputs(
    config: RunConfig, named_config: RunConfig, resume_point: ResumePoint, folder_options: RunFolderOptions
) -> None:
    """Print the files that only the checkpoint names.

    Raise if someone else wrote it, unless --trust is given.
    """
    trains = not (config.tune.only_write_lora or folder_options.only_write_model)
    known = {*named_config.inputs()}
    unnamed = [file for file in config.inputs(trains) if file not in known]
    if not unnamed:
        return
    if resume_point.is_own:
        log_line(f"note: reading {shorten(', '.join(unnamed), LINE)}, which the checkpoint names")
    elif folder_options.trust:
        for file in unnamed:
            log_line(f"note: reading {file}, which someone else's checkpoint names")
    else:
        listed = ", ".join(shorten(file, PATH) for file in unnamed[:MAX_LISTED]) + (
            f" and {len(unnamed) - MAX_LISTED} more" if unnamed[MAX_LISTED:] else ""
        )
        raise UsageError(
            f"{resume_point.path} was written by another user, machine or version, and names files to "
            f"read: {listed}; "
            f"name them on the command line too, or add {format_flag('trust')}",
            code="untrusted-checkpoint",
        )


def merge_changes(
    stored: RunConfig, config: RunConfig, given: Collection[str]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the options that a resumed run is given anew, by part, and notes about them.

    Raise UsageError if one of them may not change.
    """
    given = {"lora_scaled" if name == "lora" else name for name in given}  # --lora is stored as --lora-scaled
    changed: dict[str, dict[str, Any]] = {name: {} for name in PARTS}
    notes = list[str]()
    for part, options in config.parts.items():
        for name, spec in option_specs(type(options)).items():
            wanted, before = getattr(options, name), getattr(getattr(stored, part), name)
            if name not in given or wanted in (before, AUTO):  # an automatic value is resolved already
                continue
            if not (spec.resumable(stored.values) if callable(spec.resumable) else spec.resumable):
                raise UsageError(
                    f"{format_flag(name)} must stay as it was when a run is resumed (it is "
                    f"{format_value(before)}); leave it out",
                    code="fixed-option",
                )
            changed[part][name] = wanted
            if spec.option.announced:
                notes.append(
                    f"{format_flag(name)} is now {wanted}"
                    + (f" (it was {before})" if before is not None else "")
                )
    return changed, notes


def format_value(value: Any) -> str:
    """Return the value of an option as it is written on the command line."""
    if isinstance(value, tuple):
        return shorten(" ".join(map(format_value, value)), LINE) or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else shorten(str(value))
