"""The run that is gone on with: its checkpoint, and its options with those changed that may be."""

import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llamatrain.checkpoints.checkpoint import KERNELS, Checkpoint
from llamatrain.checkpoints.run_folder import RunFolder
from llamatrain.checkpoints.signature import SIGNATURE, is_own
from llamatrain.config.messages import LINE, shorten
from llamatrain.config.not_found import missing
from llamatrain.config.options import format_flag, option_specs, reject_unused
from llamatrain.data.find_files import check_saved_names
from llamatrain.distributed.comm import get_comm, get_launch_info
from llamatrain.engine.backend import kernel_class
from llamatrain.errors import FileError, UsageError
from llamatrain.gguf.reader import open_gguf
from llamatrain.platform.terminal import log_line
from llamatrain.run.config import COMMAND_PARTS, PARTS, RunConfig
from llamatrain.run.in_memory_rows import found_again
from llamatrain.run.lora_options import NEW_ADAPTER, LoraOptions
from llamatrain.run.options import AUTO, RunFolderOptions, TrainOptions

COMMANDS = {"train_model": "from-scratch", "finetune_lora": "finetune"}  # where no options are kept
ALONE = "a checkpoint of llama.cpp's finetune, which names neither its model nor its data"
MOST = 1 << 62  # of steps, samples, tokens
LISTED, PATH = 4, 120  # files of a checkpoint from elsewhere in one message, and the characters of each


@dataclass(frozen=True)
class ResumePoint:
    """Where a run goes on."""

    checkpoint: Checkpoint
    path: Path
    own: bool = True  # whether this user wrote it; no place that another's checkpoint names is read or written unasked
    notes: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        return self.checkpoint.state.counters.step

    @property
    def kept(self) -> bool:
        """Whether it knows its options; an ancestor's does not."""
        return bool(self.checkpoint.options)


def resumed_of(place: RunFolderOptions, command: str) -> ResumePoint | None:
    """The checkpoint that there is to go on from, which must be of this command."""
    path = place.resume or place.checkpoint_in
    if path is None or (not place.resume and open_gguf(path).kind != "checkpoint"):
        return None
    if not path.exists():
        raise missing(path)
    checkpoint, found, notes = RunFolder.read_newest(path)
    kept = checkpoint.options.get("command", COMMANDS.get(checkpoint.kind))
    if kept != command:
        if kept not in list(COMMAND_PARTS):
            raise FileError(f"{found}: a checkpoint of {kept!r:.40}, which is no command")
        if kept == "finetune" and not checkpoint.options:
            raise UsageError(f"{found}: {ALONE}: llamatrain finetune BASE.gguf DATA --checkpoint-in {path}")
        raise UsageError(f"{found}: a checkpoint of {kept}; go on with `llamatrain {kept} --resume {path}`")
    counted = vars(checkpoint.state.counters).values()
    if max(counted) >= MOST:
        raise FileError(f"{found}: its counters are damaged: {max(counted)} cannot be")
    own = get_comm().broadcast(is_own(checkpoint.options, checkpoint.extra.get(SIGNATURE)))
    return ResumePoint(checkpoint, found, own, tuple(notes))


def gone_on_with(
    asked: RunConfig, resumed: ResumePoint, given: Collection[str], altered: Collection[str]
) -> tuple[RunConfig, list[str]]:
    """Return a run's own options, with those changed that may be; and what is to be said of it."""
    if not resumed.kept:
        check_begun_anew(asked, resumed, altered)
        reject_unused(asked.unused, altered)
        return asked, []
    kept, asked = RunConfig.from_plain(resumed.checkpoint.options, resumed.path), asked.make_absolute()
    home = resumed.path.parent
    kept = replace(
        kept,
        files=found_again(kept.files, home),
        data=replace(kept.data, val=found_again(kept.data.val, home)),
    )
    check_files(kept, asked)
    changed, said = changes(kept, asked, given)
    if (
        changed["train"].get("precision") == "f32"
        and kept.tune.cache_base == "bf16"
        and "cache_base" not in given
    ):
        changed["tune"]["cache_base"] = "off"
        said.append("--cache-base is off from now on: copies in bf16 are for products in bf16")
    changed["train"].setdefault("grad_groups", shards_of(kept.train))
    if not resumed.own and "log" not in given and (sent := sorted({*kept.run.log} - {"csv", "tensorboard"})):
        changed["run"]["log"] = tuple(each for each in kept.run.log if each not in sent)
        said.append(
            f"nothing is sent to {', '.join(sent)}, since only a checkpoint from elsewhere says so; --log {sent[0]} does that"
        )
    parts = {part: replace(getattr(kept, part), **values) for part, values in changed.items()}
    made = replace(kept, base=asked.base or kept.base, **parts)  # the base may have been moved
    made = replace(
        made, data=replace(made.data, date=kept.data.date or asked.data.date)
    )  # old checkpoints know no day
    reject_unused(made.unused, altered)
    if "iters" in changed["train"] and kept.train.schedule != "constant" and "schedule" not in made.unused:
        said.append(told_of_rate(kept.train, made.train, resumed.step))
    made_by, here = resumed.checkpoint.extra.get(KERNELS), kernel_class(made.train.kernels)
    if made_by not in (None, here):
        said.append(f"the kernels are those for {here} from now on, and were for {made_by!s:.40}")
    regrouped = (made.train.grad_groups is None and get_launch_info() is not None) or (
        made.train.grad_groups or 1
    ) != (kept.train.grad_groups or 1)
    if regrouped and "grad_groups" not in given:
        said.append(
            f"a step has more groups from now on, for {get_comm().size} ranks, and had {kept.train.grad_groups or 1}"
        )
    if (
        "precision" in changed["train"]
        or "cache_base" in changed["tune"]
        or made_by not in (None, here)
        or regrouped
    ):
        said.append("so the run is not, to the bit, what it would have been")
    return made, said


def shards_of(kept: TrainOptions) -> int | None:
    """Its own, but where there are more ranks: then it is decided anew."""
    held = kept.grad_groups or 1
    return None if get_comm().size > held else held if get_launch_info() else kept.grad_groups


def told_of_rate(kept: TrainOptions, made: TrainOptions, step: int) -> str:
    """What becomes of it where there are more steps."""
    if made.schedule != "wsd":
        return f"the schedule stays: after step {kept.iters} the rate is --lr-min {kept.lr_min:g}"
    begun = (kept.iters or 0) - (kept.decay_steps or 0) + 1
    told = f"; it had begun to fall at step {begun}, and rises again" if step >= begun else ""
    return f"the rate falls in the last {made.decay_steps} of {made.iters} steps{told}"


def check_begun_anew(asked: RunConfig, resumed: ResumePoint, altered: Collection[str]) -> None:
    """What an ancestor's checkpoint of an adapter does not know is said beside it, and nothing that it knows."""
    if asked.command != "finetune":
        return
    if not asked.base or not (asked.files or asked.tune.only_write_lora):
        raise UsageError(
            f"{resumed.path}: {ALONE}: llamatrain finetune BASE.gguf DATA --checkpoint-in {resumed.path}"
        )
    new = (name for name, spec in option_specs(LoraOptions).items() if NEW_ADAPTER in spec.option.when)
    if unused := [name for name in ("full", "lora_init", *new) if name in altered]:
        raise UsageError(
            f"{format_flag(unused[0])} has no effect on the adapter in {resumed.path}; leave it out",
            code="unused-option",
        )


def check_files(kept: RunConfig, asked: RunConfig) -> None:
    if asked.files and asked.files != kept.files:
        before = shorten(" ".join(kept.files), LINE) or "the sine wave"
        raise UsageError(f"the data may not change when a run goes on: it has {before}; leave it out")
    if asked.base and asked.base != kept.base and kept.tune.full:
        raise UsageError(f"a run of --full goes on from its checkpoint, not from {asked.base}; leave it out")
    named = {*(asked.files), *asked.data.val}  # by a person
    check_saved_names([name for name in (*kept.files, *kept.data.val) if name not in named])
    if "-" in kept.files and sys.stdin.isatty():
        raise UsageError("the run's data came from standard input: give it there again")


def check_inputs(asked: RunConfig, named: RunConfig, resumed: ResumePoint, place: RunFolderOptions) -> None:
    """List the files that only the checkpoint names; of another user's checkpoint they are read with --trust alone."""
    trains, known = not (asked.tune.only_write_lora or place.only_write_model), {*named.inputs()}
    found = [each for each in asked.inputs(trains) if each not in known]
    if not found:
        return
    if resumed.own:
        log_line(f"note: reading {shorten(', '.join(found), LINE)}, as the checkpoint says")
    elif place.trust:
        for each in found:
            log_line(f"note: reading {each}, as the checkpoint from elsewhere says")
    else:
        listed = ", ".join(shorten(each, PATH) for each in found[:LISTED]) + (
            f" and {len(found) - LISTED} more" if found[LISTED:] else ""
        )
        raise UsageError(
            f"{resumed.path} has no signature of yours (another user, machine or older version wrote it), and names "
            f"files to read: {listed}; "
            f"name them beside --resume, or add {format_flag('trust')}"
        )


def changes(
    kept: RunConfig, asked: RunConfig, given: Collection[str]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the options that a resumed run is given anew, by part, and notes about them.

    Raise UsageError if one of them may not change.
    """
    given = {"lora_scaled" if name == "lora" else name for name in given}  # --lora is stored as --lora-scaled
    changed: dict[str, dict[str, Any]] = {name: {} for name in PARTS}
    notes = list[str]()
    for part, options in asked.parts.items():
        for name, spec in option_specs(type(options)).items():
            wanted, before = getattr(options, name), getattr(getattr(kept, part), name)
            if name not in given or wanted in (before, AUTO):  # what was left open is resolved already
                continue
            if not (spec.resumable(kept.values) if callable(spec.resumable) else spec.resumable):
                raise UsageError(
                    f"{format_flag(name)} must stay as it was when a run is resumed (it is {format_value(before)}); leave it out",
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
