"""Functions that train, or show what a run would need or read."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, overload

from llamatrain.api.calls import check_options, in_keywords_all, path_of, translate_errors
from llamatrain.api.run_result import Run, read_metrics
from llamatrain.commands.plan import RunPlan, plan_request
from llamatrain.commands.preview import PreviewOptions, PreviewRow, preview_rows
from llamatrain.commands.sweep import open_config, run_sweep, start_sweep
from llamatrain.commands.sweep_grid import SweepOptions, list_values, specs_of
from llamatrain.commands.sweep_result import SweepResult, result_of
from llamatrain.commands.sweep_state import read_sweep
from llamatrain.config.messages import quote
from llamatrain.config.options import build, option_specs
from llamatrain.config.signatures import document_options
from llamatrain.data.options import DataOptions
from llamatrain.data.supplied_rows import RowSource
from llamatrain.errors import UsageError
from llamatrain.platform.notebook import in_notebook
from llamatrain.platform.terminal import is_verbose
from llamatrain.preference.options import PreferenceDataOptions
from llamatrain.report.listener import Listener, add_listener
from llamatrain.run.hooks import RunHooks, create_hooks
from llamatrain.run.in_memory_rows import Data, Place, check_path, rows_for_call, rows_for_run
from llamatrain.run.options import RunFolderOptions
from llamatrain.run.request import (
    FINETUNE_DEFAULTS,
    FINETUNE_OPTIONS,
    FROM_SCRATCH_OPTIONS,
    RunRequest,
    request_finetune,
    request_from_scratch,
)
from llamatrain.run.signals import CallerInterrupts
from llamatrain.run.train import train

if TYPE_CHECKING:
    from typing import Unpack

    from llamatrain.api.option_types import FinetuneOptions, FromScratchOptions, PreviewOptionsGiven

OnStep = Callable[[dict[str, Any]], object]  # gets the metrics of a step; True stops the run
RateOfStep = Callable[[int], float]


@document_options(RunFolderOptions, *FROM_SCRATCH_OPTIONS)
def from_scratch(
    *data: Data,
    show: bool = False,
    progress: Listener | None = None,
    on_step: OnStep | None = None,
    lr_schedule: RateOfStep | None = None,
    rows: RowSource | None = None,
    **options: "Unpack[FromScratchOptions]",
) -> Run:
    """Train a new model on data, or on the built-in sine wave without any.

    Data are paths of files, folders or globs, lists of them, or lists of rows, each a dict like a JSON line.

    show: print what the command prints, to standard error.
    progress: a function that is called with each line of metrics.jsonl as a dict; an error that it raises
        ends the run.
    on_step: a function that is called with the metrics of each step as a dict. If it returns True, the run
        saves a checkpoint and ends, and can be resumed; an error that it raises ends the run.
    lr_schedule: a function of the step, which counts from 1, that returns its learning rate, in place of the
        options of the rate. A resumed run needs it again.
    rows: token ids to train on, in place of data: a function of the row's number, which counts from 0, or an
        iterable of lists of ids. A list is repeated; an iterator must be long enough, and begins again with
        row 0 for a resumed run, which needs `rows` again. A row has from 2 ids to one more than the context.
    """
    with (
        translate_errors(show),
        run_hooks(progress, on_step, lr_schedule, rows) as hooks,
        rows_for_run("from-scratch", data, {**options}) as (files, overrides),
    ):
        values = check_options(overrides, RunFolderOptions, *FROM_SCRATCH_OPTIONS)
        return run_request(request_from_scratch(files, values, hooks))


@document_options(RunFolderOptions, *FINETUNE_OPTIONS, defaults=FINETUNE_DEFAULTS)
def finetune(
    base: Place | None = None,
    *data: Data,
    show: bool = False,
    progress: Listener | None = None,
    on_step: OnStep | None = None,
    lr_schedule: RateOfStep | None = None,
    rows: RowSource | None = None,
    **options: "Unpack[FinetuneOptions]",
) -> Run:
    """Train a LoRA adapter for a GGUF model on data; with `full=True`, train the model itself.

    `data`, `show`, `progress`, `on_step`, `lr_schedule` and `rows` are those of `from_scratch`.

    base: the model's file; None to resume a run that knows it.
    """
    with (
        translate_errors(show),
        run_hooks(progress, on_step, lr_schedule, rows) as hooks,
        rows_for_run("finetune", data, {**options}) as (files, overrides),
    ):
        model = None if base is None else str(path_of(base))
        values = check_options(overrides, RunFolderOptions, *FINETUNE_OPTIONS)
        return run_request(request_finetune(model, files, values, hooks))


@document_options(SweepOptions, without=("json",))
def sweep(config: Place | None = None, *data: Place, show: bool = False, **options: Any) -> SweepResult:
    """Train the run of a config file with several values of its options, and return the runs, the best first.

    The other options are those of `from_scratch` or `finetune`; a list has the values to try. The data, and a
    base before them, may be given after the config.

    show: print what the command prints, to standard error.
    """
    with translate_errors(show):
        own = {name: options.pop(name) for name in option_specs(SweepOptions) if name in options}
        given = build(SweepOptions, check_options(own, SweepOptions))
        if given.resume is not None:
            if config is not None or data or options:
                raise UsageError(
                    "resume= goes on with the sweep as it is; leave out the rest", code="unused-option"
                )
            folder, state = given.resume, read_sweep(given.resume)
        else:
            if config is None:
                raise UsageError("config is missing; name a config file", code="missing-config")
            opened = open_config(path_of(config), [check_path(each) for each in data])
            folder, state = start_sweep(opened, list_values(options, specs_of(opened.command)), given)
        run_sweep(folder, state, CallerInterrupts)
        return result_of(folder, state)


@overload
def plan(
    command: Literal["from-scratch"],
    *data: Data,
    measure: bool = False,
    **options: "Unpack[FromScratchOptions]",
) -> RunPlan: ...


@overload
def plan(
    command: Literal["finetune"], *data: Data, measure: bool = False, **options: "Unpack[FinetuneOptions]"
) -> RunPlan: ...


def plan(command: str, *data: Data, measure: bool = False, **options: Any) -> RunPlan:
    """Plan memory and time of `from_scratch(*data, ...)` or `finetune(base, *data, ...)`, without training.

    command: "from-scratch" or "finetune"; for the latter the data begins with the base.
    measure: measure this machine's speed now, instead of using a measurement of the last day.
    """
    with translate_errors():
        if command not in ("from-scratch", "finetune"):
            raise UsageError(
                f"command must be from-scratch or finetune (got {quote(command)})", code="unknown-command"
            )
        base = path_of(data[0]) if command == "finetune" and data else None
        with rows_for_call(data[1:] if base else data) as files:
            if command == "finetune":
                return plan_request(
                    request_finetune(
                        str(base) if base else None,
                        files,
                        check_options(options, RunFolderOptions, *FINETUNE_OPTIONS),
                    ),
                    measure,
                )
            return plan_request(
                request_from_scratch(files, check_options(options, RunFolderOptions, *FROM_SCRATCH_OPTIONS)),
                measure,
            )


@document_options(PreviewOptions, PreferenceDataOptions, DataOptions, without=("model",))
def preview(*data: Data, model: Place, **options: "Unpack[PreviewOptionsGiven]") -> list[PreviewRow]:
    """Return the first rows of data as they would be trained with a model: tokens, text, and what is trained."""
    with translate_errors(), rows_for_call(data) as files:
        values = check_options(
            {**options, "model": model}, PreviewOptions, PreferenceDataOptions, DataOptions
        )
        return preview_rows(
            files,
            build(PreviewOptions, values),
            build(DataOptions, values),
            build(PreferenceDataOptions, values),
        )


@contextmanager
def run_hooks(
    progress: Listener | None,
    on_step: OnStep | None,
    lr_schedule: RateOfStep | None,
    rows: RowSource | None,
) -> Iterator[RunHooks]:
    """Yield the hooks of a run; functions that get its metrics do so until the block ends."""
    hooks = create_hooks(on_step, lr_schedule, rows)
    with add_listener(progress), add_listener(hooks.on_step):
        yield hooks


def run_request(request: RunRequest) -> Run:
    """Train, and return the result as the API reports it."""
    with show_in_notebook(request):
        finished = train(request, CallerInterrupts())
    return Run(
        folder=finished.folder,
        result=finished.result,
        **read_metrics(finished)._asdict(),
        steps=finished.steps,
        best=finished.best,
        finished=finished.stop.finished,
        reason=finished.stop.reason,
        notes=in_keywords_all(finished.notes),
    )


@contextmanager
def show_in_notebook(request: RunRequest) -> Iterator[None]:
    """Draw the progress of a run below its cell, if the run is shown and this is a notebook."""
    if not (is_verbose() and in_notebook()):
        yield
        return
    from llamatrain.report.notebook import NotebookProgress

    area = NotebookProgress(request.config.command, request.config.train.iters, time.monotonic())
    with add_listener(lambda line: area.add(line, time.monotonic())):
        yield
