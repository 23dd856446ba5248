"""Runs one config with several values of some options, and continues the best runs (successive halving).

The runs take turns in one process: each goes on to the end of a round, where its validation loss is measured;
the best go on in the next round. A run that went on is the run that would have been trained at once.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamatrain.checkpoints.filenames import can_resume, numbered_checkpoints
from llamatrain.checkpoints.new_run_dir import create_next_folder, ensure_folder
from llamatrain.checkpoints.run_folder import RUNS
from llamatrain.commands.sweep_grid import SweepOptions, combinations, parse_value, round_steps, specs_of
from llamatrain.commands.sweep_result import draw_page
from llamatrain.commands.sweep_state import (
    LONGEST,
    Sweep,
    Trial,
    check_no_sweep,
    locked,
    save,
    steps_done,
    total_steps,
)
from llamatrain.config.read_limited import read_limited
from llamatrain.config.remote_names import is_model_name, remote_name
from llamatrain.config.toml import BaseArgument, DataArgument, read_config
from llamatrain.errors import LlamatrainError, UsageError
from llamatrain.platform.terminal import log_line, progress_bar, quiet, show_log
from llamatrain.report.listener import add_listener
from llamatrain.report.metrics import read_lines
from llamatrain.report.output_file import write_text
from llamatrain.report.run_data import METRICS
from llamatrain.run.hooks import RunHooks, StepCallback
from llamatrain.run.options import ITERS
from llamatrain.run.request import (
    FINETUNE_OPTIONS,
    FROM_SCRATCH_OPTIONS,
    RunRequest,
    request_finetune,
    request_from_scratch,
)
from llamatrain.run.signals import Interrupts
from llamatrain.run.train import train
from llamatrain.sources.names import can_convert

COPY = "sweep.toml"
UNSAFE = re.compile(r"[^A-Za-z0-9.+]+")


# ---- a new sweep ---------------------------------------------------------------


def request_trial(config: Path, folder: Path, sweep: Sweep, trial: Trial, hooks: RunHooks) -> RunRequest:
    """Return the request for a run from its beginning."""
    specs = specs_of(sweep.command)
    given = {name: parse_value(text, specs[name]) for name, text in {**sweep.fixed, **trial.values}.items()}
    values = {**given, "config": config, "out": folder / trial.folder, "overwrite": True}
    if sweep.command == "finetune":
        return request_finetune(sweep.base or None, sweep.files, values, hooks)
    return request_from_scratch(sweep.files, values, hooks)


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """The config that all runs begin with, and the command that it is for."""

    path: Path
    text: str
    command: str
    base: str
    files: Sequence[str]


def open_config(path: Path, files: Sequence[str]) -> SweepConfig:
    """Read a config; with a base it is for `finetune`, otherwise for `from-scratch`."""
    text = read_limited(path, LONGEST, "a config file")
    classes = (*FINETUNE_OPTIONS, *FROM_SCRATCH_OPTIONS)
    values = read_config(path, *classes, BaseArgument, DataArgument)
    base, data = find_base(values, files)
    command = "finetune" if base else "from-scratch"
    return SweepConfig(path=path, text=text.decode(), command=command, base=base, files=data)


def start_sweep(
    config: SweepConfig, lists: Mapping[str, Sequence[str]], options: SweepOptions
) -> tuple[Path, Sweep]:
    """Make the folder of a new sweep; every run's options are checked before anything is written."""
    trials = combinations({name: values for name, values in lists.items() if len(values) > 1}, options)
    folder = options.out or RUNS / "sweep"
    check_no_sweep(folder)
    sweep = Sweep(
        command=config.command,
        base=config.base,
        files=[*config.files],
        fixed={name: values[0] for name, values in lists.items() if len(values) == 1},
        halving=options.halving,
        steps=[],
        trials=[
            Trial(values=each, folder=trial_folder(number, each)) for number, each in enumerate(trials, 1)
        ],
    )
    requests = [request_trial(config.path, folder, sweep, trial, RunHooks()) for trial in sweep.trials]
    check_comparable(requests, options.sample)
    sweep.steps = round_steps(requests[0].config.train.iters or ITERS, len(trials), options)
    folder = options.out or create_next_folder(RUNS, "sweep")
    ensure_folder(folder)
    with locked(folder):
        check_no_sweep(folder)
        write_text(folder / COPY, config.text)
        save(folder, sweep)
    return folder, sweep


def find_base(values: Mapping[str, Any], files: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the base model and the data, from the config or from the arguments after it."""
    base = values.get("base", "")
    if not base and files and names_model(files[0]):
        return files[0], files[1:] or values.get("data", ())
    return base, files or values.get("data", ())


def names_model(text: str) -> bool:
    """Return True if an argument names a model and not data: a GGUF file, a folder of one, or a remote name."""
    name = remote_name(text)
    return is_model_name(name) if name else text.endswith(".gguf") or can_convert(Path(text))


def check_comparable(requests: Sequence[RunRequest], sample: int | None) -> None:
    """Raise unless all runs have validation data and the same number of steps."""
    first = requests[0].config
    if sample == 1:
        raise UsageError(
            "--sample 1 leaves one run, and a sweep compares several; give --sample 2", code="no-choice"
        )
    if len(requests) < 2:
        raise UsageError(
            "a sweep needs an option with several values, such as --lr 1e-4,3e-4", code="no-choice"
        )
    if not (first.data.val or first.data.val_split):
        raise UsageError(
            "a sweep compares runs by their validation loss; give --val FILE or --val-split 0.05",
            code="no-validation",
        )
    if any(not request.config.run.eval_every for request in requests):
        raise UsageError(
            "--eval-every 0 leaves out the validation by which runs are compared; leave it out",
            code="no-validation",
        )
    different = len({request.config.train.iters for request in requests}) > 1
    if different or first.train.epochs or first.model.minutes:
        raise UsageError(
            "the runs of a sweep must have the same number of steps; give one --iters", code="different-steps"
        )


def trial_folder(number: int, values: Mapping[str, str]) -> str:
    """Return the name of a run's folder, from its values."""
    words = "_".join(UNSAFE.sub("-", f"{name} {value}") for name, value in values.items())
    return f"{number:02}_{words}"[:80].rstrip(".-_")


# ---- running -------------------------------------------------------------------


class StopAtStep:
    """A callback that counts steps and stops a run at one."""

    def __init__(self, last: int, advance: Callable[[int], None]) -> None:
        self._last, self._advance = last, advance

    def __call__(self, line: dict[str, Any]) -> bool:
        """Return True at the last step."""
        self._advance(1)
        return int(line["step"]) >= self._last


def run_sweep(folder: Path, sweep: Sweep, interrupts: Callable[[], Interrupts]) -> int:
    """Train the rounds that are left; return the signal that stopped it, or 0."""
    left = total_steps(sweep) - steps_done(sweep)
    with locked(folder), interrupts() as between_runs, progress_bar("sweep", total=left) as bar:
        between_runs.after_exit = lambda: tell_how_to_resume(folder)
        for number, last in enumerate(sweep.steps):
            for place, trial in enumerate(members := sweep.members(number), 1):
                if len(trial.losses) > number:
                    continue
                log_line(
                    f"round {number + 1} of {len(sweep.steps)}, run {place} of {len(members)}, "
                    f"to step {last:,}: {trial.title}"
                )
                signal_number = run_trial(folder, sweep, trial, last, bar.update, interrupts())
                save(folder, sweep)
                if signal_number:
                    return signal_number
                draw_page(folder, sweep)
    if not any(math.isfinite(loss) for trial in sweep.trials for loss in trial.losses):
        reason = sweep.trials[0].error or "its validation loss is no number; try lower learning rates"
        raise LlamatrainError(f"every run failed; the first: {reason}", code="sweep-failed")
    return 0


def run_trial(
    folder: Path,
    sweep: Sweep,
    trial: Trial,
    last: int,
    advance: Callable[[int], None],
    interrupts: Interrupts,
) -> int:
    """Train one run to the end of a round; return the signal that stopped it, or 0."""
    place = folder / trial.folder
    hooks = RunHooks(on_step=StepCallback(StopAtStep(last, advance)))
    interrupts.after_exit = lambda: tell_how_to_resume(folder)
    try:
        # The end of a run is always asked for: it may have been killed before it wrote its result.
        if last_step(place) < last or last == sweep.steps[-1]:
            with quiet(), add_listener(hooks.on_step):
                train(request_round(place, folder, sweep, trial, hooks, last), interrupts)
            if interrupts.pending and last_step(place) < last:
                return interrupts.pending
        trial.losses.append(validation_loss(place, last))
    except LlamatrainError as error:
        trial.error = str(error)
        log_line(f"warning: {trial.title}: the run failed: {error}")
    return interrupts.pending


def tell_how_to_resume(folder: Path) -> None:
    """Print how a sweep that was stopped goes on."""
    with show_log():
        log_line(f"stopped; continue with llamatrain sweep --resume {folder}")


def request_round(
    place: Path, folder: Path, sweep: Sweep, trial: Trial, hooks: RunHooks, last: int
) -> RunRequest:
    """Return the request that begins a run or continues it to the end of a round.

    A run that was stopped at the end of a round, before its validation there, begins again.
    """
    stopped_late = (
        place.is_dir() and max(numbered_checkpoints(place), default=0) >= last and last_step(place) < last
    )
    if stopped_late or not (place.is_dir() and can_resume(place)):
        return request_trial(folder / COPY, folder, sweep, trial, hooks)
    if sweep.command == "finetune":
        return request_finetune(None, (), {"resume": place}, hooks)
    return request_from_scratch((), {"resume": place}, hooks)


def validations(place: Path) -> list[Mapping[str, Any]]:
    """Return the validations among the metrics of a run."""
    return [line for _, line in read_lines(place / METRICS) if "val_loss" in line]


def last_step(place: Path) -> int:
    """Return the last step at which a run was validated, or 0."""
    return max((int(line["step"]) for line in validations(place)), default=0)


def validation_loss(place: Path, last: int) -> float:
    """Return the last validation loss up to a step; infinity stands for one that is no number."""
    found = [line for line in validations(place) if int(line["step"]) <= last]
    loss = found[-1]["val_loss"] if found else None
    return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else math.inf
