"""Keeps how far a sweep is in `sweep.json`, and locks its folder."""

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from llamatrain.checkpoints.lock import lock_folder
from llamatrain.commands.sweep_grid import specs_of
from llamatrain.config.read_limited import read_limited
from llamatrain.errors import FileError
from llamatrain.report.output_file import write_text

STATE = "sweep.json"
LONGEST = 1 << 22


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


def total_steps(sweep: Sweep) -> int:
    """Return the steps of all rounds, if no run fails."""
    total, members, before = 0, len(sweep.trials), 0
    for last in sweep.steps:
        total, before, members = total + members * (last - before), last, max(1, members // sweep.halving)
    return total


def steps_done(sweep: Sweep) -> int:
    """Return the steps that are done already."""
    return sum(sweep.steps[len(trial.losses) - 1] for trial in sweep.trials if trial.losses)


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


def save(folder: Path, sweep: Sweep) -> None:
    """Store how far a sweep is."""
    stored = asdict(sweep)
    for trial in stored["trials"]:  # JSON has no infinity
        trial["losses"] = [loss if math.isfinite(loss) else None for loss in trial["losses"]]
    write_text(folder / STATE, json.dumps(stored, indent=1, allow_nan=False) + "\n")


def read_sweep(folder: Path) -> Sweep:
    """Read a sweep from its folder; its runs that failed are tried again."""
    path = folder / STATE
    if not path.exists():
        raise FileError(f"{folder}: the folder contains no sweep ({STATE} is missing)", code="no-sweep")
    try:
        stored = json.loads(read_limited(path, LONGEST, "a sweep"))
        trials = [Trial(**each) for each in stored.pop("trials")]
        sweep = Sweep(**stored, trials=trials)
        for trial in trials:
            trial.error = ""
            trial.losses = [math.inf if loss is None else loss for loss in trial.losses]
        check_stored(sweep)
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
