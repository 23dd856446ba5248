"""Parts of a run that are no options: a callback, a rate and rows of a Python program, and a pause.

A checkpoint stores only which of them a run has. A resumed run needs those again that decide what is trained.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamatrain.config.messages import quote
from llamatrain.config.options import OptionError
from llamatrain.distributed.launcher import check_single_process
from llamatrain.errors import FileError, UsageError
from llamatrain.run.config import RunConfig

if TYPE_CHECKING:
    from llamatrain.data.supplied_rows import RowSource
    from llamatrain.optim.schedule import FunctionSchedule
    from llamatrain.run.resume import ResumePoint

HOOKS = "hooks"  # the key of their names in a checkpoint
SCHEDULE, ROWS = "lr_schedule", "rows"  # the keywords of the functions of Python's API
RATE_OPTIONS = ("lr", "lr_min", "warmup", "schedule", "decay_steps", "restart_growth")


class StepCallback:
    """Passes the metrics of each step to a function, and remembers if it asked to stop."""

    def __init__(self, function: Callable[[dict[str, Any]], object]) -> None:
        self._function, self.wants_stop = function, False

    def __call__(self, line: Mapping[str, Any]) -> None:
        """Call the function with a line of metrics, unless the line is a validation's."""
        if "val_loss" not in line and self._function({**line}):
            self.wants_stop = True


@dataclass(frozen=True, kw_only=True)
class RunHooks:
    """Parts of a run that are no options; None: there is none."""

    on_step: StepCallback | None = None
    schedule: "FunctionSchedule | None" = None
    rows: "RowSource | None" = None
    pause: int = 0  # the step after which the run pauses; 0: none
    continues: bool = False  # after such a pause

    @property
    def wants_stop(self) -> bool:
        """True if the callback asked to stop."""
        return self.on_step is not None and self.on_step.wants_stop

    @property
    def stored(self) -> list[str]:
        """The keywords of those that a resumed run needs again."""
        return [name for name, hook in ((SCHEDULE, self.schedule), (ROWS, self.rows)) if hook is not None]

    @property
    def notes(self) -> list[str]:
        """Notes about options that have no effect."""
        return ["lr_schedule= gives the learning rate; the options of the rate have no effect"] * bool(
            self.schedule
        )

    def check_resume(self, resume_point: "ResumePoint") -> None:
        """Raise if a resumed run lacks a hook that it began with, or has another one."""
        before = stored_hooks(resume_point)
        if missing := [name for name in before if name not in self.stored]:
            raise UsageError(
                f"{resume_point.path}: a Python program gave this run {quote_names(missing)}, which cannot be stored; "
                "resume it from Python with the same",
                code="missing-hook",
            )
        if added := [name for name in self.stored if name not in before]:
            raise UsageError(
                f"{quote_names(added)} cannot begin when a run is resumed; leave it out", code="fixed-option"
            )


NO_HOOKS = RunHooks()


def quote_names(names: list[str]) -> str:
    """Return keywords for a message."""
    return " and ".join(f"{name}=" for name in names)


def stored_hooks(resume_point: "ResumePoint") -> list[str]:
    """Return the keywords of the hooks that a run began with."""
    names = resume_point.checkpoint.extra.get(HOOKS, [])
    if not isinstance(names, list) or not {SCHEDULE, ROWS}.issuperset(map(str, names)):
        raise FileError(
            f"{resume_point.path}: the checkpoint names unknown hooks (got {quote(names)})",
            code="damaged-checkpoint",
        )
    return names


def create_hooks(on_step: object, lr_schedule: object, rows: "RowSource | None") -> RunHooks:
    """Return the hooks of a run, each checked."""
    from llamatrain.optim.schedule import FunctionSchedule

    for name, function in (("on_step", on_step), ("lr_schedule", lr_schedule)):
        if function is not None and not callable(function):
            raise UsageError(f"{name} must be a function (got {quote(function)})", code=f"invalid-{name}")
    hooks = RunHooks(
        on_step=StepCallback(on_step) if callable(on_step) else None,
        schedule=FunctionSchedule(lr_schedule) if callable(lr_schedule) else None,
        rows=rows,
    )
    if hooks != NO_HOOKS:
        check_single_process(
            "on_step, lr_schedule and rows", "start the program without mpiexec, or leave them out"
        )
    return hooks


def check_hooks(hooks: RunHooks, config: RunConfig, given: set[str]) -> None:
    """Raise if options have no effect with the hooks."""
    unused = {name: "lr_schedule=" for name in RATE_OPTIONS if hooks.schedule}
    unused |= {"epochs": "rows="} if hooks.rows is not None else {}
    for name, hook in unused.items():
        if name in given:
            raise OptionError(
                lambda spelt, name=name, hook=hook: f"{spelt(name)} has no effect with {hook}; leave it out"  # type: ignore[misc]
            )
    if hooks.schedule and config.train.optimizer == "lbfgs":
        raise UsageError(
            "lr_schedule= has no effect with --optimizer lbfgs; leave it out", code="unused-option"
        )
    if hooks.rows is None:
        return
    if config.files:
        raise UsageError("rows= takes the place of data; leave one of them out", code="two-data")
    if config.preference.objective:
        raise UsageError(
            f"rows= has no answers to compare, as --objective {config.preference.objective} needs; name a file",
            code="unused-option",
        )
    if config.train.teacher and config.command == "from-scratch":
        raise UsageError("--teacher of a new model needs data; leave out rows=", code="unused-option")
