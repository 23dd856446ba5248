"""Runs one config with several values of some options, and continues the best runs (successive halving).

The runs take turns in one process: each goes on to the end of a round, where its validation loss is measured;
the best go on in the next round. A run that went on is the run that would have been trained at once.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llamatrain.checkpoints.filenames import can_resume, numbered_checkpoints
from llamatrain.checkpoints.lock import lock_folder
from llamatrain.checkpoints.new_run_dir import create_next_folder, ensure_folder
from llamatrain.checkpoints.run_folder import RUNS
from llamatrain.commands.sweep_grid import SweepOptions, combinations, parse_value, round_steps, specs_of
from llamatrain.config.read_limited import read_limited
from llamatrain.config.remote_names import is_model_name, remote_name
from llamatrain.config.toml import BaseArgument, DataArgument, read_config
from llamatrain.errors import FileError, LlamatrainError, UsageError
from llamatrain.platform.terminal import log_line, progress_bar, quiet, show_log
from llamatrain.report.format import format_loss
from llamatrain.report.listener import add_listener
from llamatrain.report.metrics import read_lines
from llamatrain.report.output_file import write_text
from llamatrain.report.run_data import METRICS, read_run_data
from llamatrain.report.sweep_page import SweepRow, sweep_page
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

STATE, PAGE, COPY = "sweep.json", "sweep.html", "sweep.toml"
LONGEST = 1 << 22
UNSAFE = re.compile(r"[^A-Za-z0-9.+]+")


@dataclass(kw_only=True)
class Trial:
    """A run of a sweep."""

    values: dict[str, str]  # by option, as they were written
    folder: str  # in the folder of the sweep
    losses: list[float] = field(default_factory=list)  # at the end of each round
    error: str = ""

    @property
    def title(self) -> str:
        """The values in one line."""
        return ", ".join(f"{name.replace('_', '-')} {value}" for name, value in self.values.items())


@dataclass(kw_only=True)
class Sweep:
    """A sweep and how far it is; stored as JSON."""

    command: str
    base: str
    files: list[str]
    fixed: dict[str, str]  # options that all runs have, besides the config's
    halving: int
    steps: list[int]  # at which the rounds end
    trials: list[Trial]

    def rank(self, number: int) -> list[Trial]:
        """Return the trials that took part in a round, the best first."""
        done = [trial for trial in self.trials if len(trial.losses) > number]
        return sorted(done, key=lambda trial: (not math.isfinite(trial.losses[number]), trial.losses[number]))

    def members(self, number: int) -> list[Trial]:
        """Return the trials of a round, in their order."""
        if number == 0:
            return [trial for trial in self.trials if not trial.error]
        before = self.rank(number - 1)
        kept = [id(trial) for trial in before[: max(1, len(before) // self.halving)]]
        return [
            trial
            for trial in self.trials
            if id(trial) in kept and math.isfinite(trial.losses[number - 1]) and not trial.error
        ]

    @property
    def best(self) -> list[Trial]:
        """The trials, the best first: first by how far they came."""
        order = {
            id(trial): place
            for number in range(len(self.steps))
            for place, trial in enumerate(self.rank(number))
        }
        return sorted(self.trials, key=lambda trial: (-len(trial.losses), order.get(id(trial), 0)))


# ---- a sweep's folder ----------------------------------------------------------


def request_trial(config: Path, folder: Path, sweep: Sweep, trial: Trial, hooks: RunHooks) -> RunRequest:
    """Return the request for a run from its beginning."""
    specs = specs_of(sweep.command)
    given = {name: parse_value(text, specs[name]) for name, text in {**sweep.fixed, **trial.values}.items()}
    values = {**given, "config": config, "out": folder / trial.folder, "overwrite": True}
    if sweep.command == "finetune":
        return request_finetune(sweep.base or None, sweep.files, values, hooks)
    return request_from_scratch(sweep.files, values, hooks)


@dataclass(frozen=True, kw_only=True)
class SweptRun:
    """A run of a sweep that has ended."""

    folder: Path
    values: dict[str, str]  # by option
    losses: list[float | None]  # of validation, at the end of each round; None: no number
    error: str | None


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """The result of a sweep: its runs, the best first."""

    folder: Path
    best: Path
    steps: list[int]  # at which the rounds ended
    runs: list[SweptRun]

    def _repr_html_(self) -> str:
        """Return the table of the runs for a notebook."""
        from llamatrain.report.notebook import table_html

        names = list(dict.fromkeys(name for run in self.runs for name in run.values))
        rows = [
            [
                *(run.values.get(name, "") for name in names),
                *("diverged" if loss is None else format_loss(loss) for loss in run.losses),
                *[""] * (len(self.steps) - len(run.losses)),
                run.error or str(run.folder),
            ]
            for run in self.runs
        ]
        return table_html([*names, *(f"step {step:,}" for step in self.steps), "run"], rows)


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


def check_no_sweep(folder: Path) -> None:
    """Raise if a folder contains a sweep."""
    if (folder / STATE).exists():
        raise FileError(
            f"{folder}: the folder already contains a sweep; go on with --resume {folder}, or choose another --out",
            code="run-exists",
        )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder of a sweep; raise FileError if another process works on it."""
    lock = lock_folder(folder)
    try:
        yield
    finally:
        lock.release()


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
    if len({request.config.train.iters for request in requests}) > 1 or first.train.epochs:
        raise UsageError(
            "the runs of a sweep must have the same number of steps; give one --iters", code="different-steps"
        )


def trial_folder(number: int, values: Mapping[str, str]) -> str:
    """Return the name of a run's folder, from its values."""
    words = "_".join(UNSAFE.sub("-", f"{name} {value}") for name, value in values.items())
    return f"{number:02}_{words}"[:80].rstrip(".-_")


def save(folder: Path, sweep: Sweep) -> None:
    """Store how far a sweep is."""
    write_text(folder / STATE, json.dumps(asdict(sweep), indent=1) + "\n")


def read_sweep(folder: Path) -> Sweep:
    """Read a sweep from its folder; its runs that failed are tried again."""
    path = folder / STATE
    if not path.exists():
        raise FileError(f"{folder}: the folder contains no sweep ({STATE} is missing)", code="no-sweep")
    try:
        stored = json.loads(read_limited(path, LONGEST, "a sweep"))
        trials = [Trial(**each) for each in stored.pop("trials")]
        sweep = Sweep(**stored, trials=trials)
        check_stored(sweep)
        for trial in trials:
            trial.error = ""
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise FileError(f"{path}: damaged; begin a new sweep", code="damaged-sweep") from None
    return sweep


def check_stored(sweep: Sweep) -> None:
    """Raise ValueError unless a stored sweep makes sense."""
    specs = specs_of(sweep.command)
    names = {name for trial in sweep.trials for name in (*trial.values, *sweep.fixed)}
    texts = [text for trial in sweep.trials for text in (*trial.values.values(), *sweep.fixed.values())]
    folders = [trial.folder for trial in sweep.trials]
    losses = [loss for trial in sweep.trials for loss in trial.losses]
    valid = (
        sweep.command in ("finetune", "from-scratch")
        and sweep.trials
        and sweep.steps
        and names <= specs.keys()
        and all(isinstance(text, str) for text in (*texts, *sweep.files, sweep.base))
        and all(re.fullmatch(r"[\w.+-]+", name) and not name.startswith(".") for name in folders)
        and all(isinstance(step, int) and step > 0 for step in (*sweep.steps, sweep.halving))
        and all(isinstance(loss, int | float) for loss in losses)
        and all(len(trial.losses) <= len(sweep.steps) for trial in sweep.trials)
        and sweep.steps == sorted(sweep.steps)
    )
    if not valid:
        raise ValueError(sweep)


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


def total_steps(sweep: Sweep) -> int:
    """Return the steps of all rounds, if no run fails."""
    total, members, before = 0, len(sweep.trials), 0
    for last in sweep.steps:
        total, before, members = total + members * (last - before), last, max(1, members // sweep.halving)
    return total


def steps_done(sweep: Sweep) -> int:
    """Return the steps that are done already."""
    return sum(sweep.steps[len(trial.losses) - 1] for trial in sweep.trials if trial.losses)


def rows(sweep: Sweep) -> list[SweepRow]:
    """Return the rows of the table, the best run first."""
    return [
        SweepRow(values=trial.values, losses=tuple(trial.losses), error=trial.error, folder=trial.folder)
        for trial in sweep.best
    ]


def draw_page(folder: Path, sweep: Sweep) -> None:
    """Draw the page of a sweep: the table and the curves of all runs."""
    runs = [read_run_data(folder / trial.folder, log_line) for trial in sweep.best if trial.losses]
    drawn = [run for run in runs if run.figures.last or run.figures.scored]
    write_text(folder / PAGE, sweep_page(str(folder), sweep.steps, rows(sweep), drawn))


def result_of(folder: Path, sweep: Sweep) -> SweepResult:
    """Return the result of a sweep that is complete."""
    runs = [
        SweptRun(
            folder=folder / trial.folder,
            values=trial.values,
            losses=[loss if math.isfinite(loss) else None for loss in trial.losses],
            error=trial.error or None,
        )
        for trial in sweep.best
    ]
    return SweepResult(folder=folder, best=runs[0].folder, steps=sweep.steps, runs=runs)
