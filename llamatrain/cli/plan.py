"""`llamatrain plan`: shows memory and time of a run before anything is loaded."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import time as clock
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from llamatrain.cli.finetune import Base
from llamatrain.cli.from_scratch import Data
from llamatrain.cli.typer_app import CommandGroup, ReadOnlyCommand, make_app, with_options
from llamatrain.config.common import JSON
from llamatrain.config.options import Option, OptionError, Options, build
from llamatrain.config.units import Bandwidth, Size
from llamatrain.errors import MemoryPlanError, UsageError
from llamatrain.platform.terminal import log_line
from llamatrain.report.format import format_duration, format_step_time
from llamatrain.run.options import RunFolderOptions
from llamatrain.run.request import (
    FINETUNE_DEFAULTS,
    FINETUNE_OPTIONS,
    FROM_SCRATCH_OPTIONS,
    request_finetune,
    request_from_scratch,
)

if TYPE_CHECKING:
    from llamatrain.planner.speeds import OpSpeeds
    from llamatrain.planner.time import TimeForecast
    from llamatrain.run.fit_memory import FittedRun
    from llamatrain.run.prepare import PlannedRun
    from llamatrain.run.request import RunRequest
    from llamatrain.run.scaling import ScalingForecast
    from llamatrain.train.graphs import StepGraphs

DEFAULT_NETWORK = Bandwidth(1e10)


@dataclass(frozen=True)
class PlanOptions(Options, panel="The plan"):
    """Options of `plan`."""

    json: Annotated[
        bool,
        replace(JSON, sentence="Print one JSON object: bytes by purpose, and the plan."),
    ] = False
    graph: Annotated[
        Literal["text", "dot", "memory"] | None,
        Option(
            "Print the graph of a batch of the longest rows instead: as text, for Graphviz, or its memory."
        ),
    ] = None
    svg: Annotated[
        Path | None,
        Option(
            "Draw the memory of a batch of the longest rows, call by call, to this file.",
            unit="FILE",
        ),
    ] = None
    ranks: Annotated[
        int | None,
        Option(
            "Plan for this many ranks, each on a machine like this one, and forecast steps on 1 to "
            "4096 ranks.",
            unit="RANKS",
            least=1,
            most=4096,
            excludes=(("graph", "a graph belongs to one rank"), ("svg", "a memory map belongs to one rank")),
        ),
    ] = None
    measure: Annotated[
        bool,
        Option("Measure the speed of this machine now, instead of using a measurement of the last day."),
    ] = False
    network: Annotated[
        Bandwidth | None,
        Option("Network link of each machine, such as 1Gbit; default: 10Gbit. Needs --ranks."),
    ] = None

    def validate(self) -> None:
        """Raise OptionError if options contradict each other."""
        if self.network is not None and self.ranks is None:
            raise OptionError(
                lambda spelt: f"{spelt('network')} has no effect without {spelt('ranks')}; leave it out",
                code="unused-option",
            )


command = make_app(cls=CommandGroup, invoke_without_command=True)


@command.callback()
def plan(context: typer.Context) -> None:
    """Show the memory and time of a run without reading its data or starting it."""
    if context.invoked_subcommand is None:
        raise UsageError(
            "the command to plan is missing; use llamatrain plan from-scratch ... or llamatrain plan "
            "finetune ...",
            code="missing-command",
        )


@command.command("from-scratch", cls=ReadOnlyCommand)
@with_options(PlanOptions, RunFolderOptions, *FROM_SCRATCH_OPTIONS)
def plan_from_scratch(data: Data = None, **overrides: Any) -> None:
    """Plan `llamatrain from-scratch` with these options.

    Text is not read: a vocabulary that will be learned counts in full.
    """
    print_plan(request_from_scratch(data or (), overrides), build(PlanOptions, overrides))


@command.command("finetune", cls=ReadOnlyCommand)
@with_options(PlanOptions, RunFolderOptions, *FINETUNE_OPTIONS, defaults=FINETUNE_DEFAULTS)
def plan_finetune(base: Base = None, data: Data = None, **overrides: Any) -> None:
    """Plan `llamatrain finetune` with these options. Only the header of the base is read."""
    print_plan(request_finetune(base, data or (), overrides), build(PlanOptions, overrides))


def print_plan(request: "RunRequest", options: PlanOptions) -> None:
    """Plan a run and print the result."""
    from llamatrain.report.output_file import check_output_file
    from llamatrain.run.prepare import plan_run
    from llamatrain.run.time_budget import fit_time

    if options.svg:
        check_output_file(options.svg)
    needs_graphs = options.graph is not None or options.svg is not None
    fitted_request = fit_time(request)
    for note in fitted_request.notes[len(request.notes) :]:
        log_line(f"note: {note}")
    planned = plan_run(fitted_request, graphs=needs_graphs, ranks=options.ranks or 0)
    memory_plan, error, limit = planned.fitted.plan, planned.fitted.error, request.config.train.memory
    if options.svg:
        draw_memory_map(memory_plan.graphs, options.svg, memory_plan.spec.h.describe())
    if options.graph:
        print_graph(memory_plan.graphs, options.graph)
        return
    if error and limit is not None:
        raise MemoryPlanError(error, code="out-of-memory")
    scaling, time = None, None
    if options.ranks:
        from llamatrain.run.scaling import forecast_scaling

        scaling = forecast_scaling(
            memory_plan, planned.config, options.network or DEFAULT_NETWORK, options.measure
        )
    else:
        from llamatrain.planner.time import forecast_time

        time = forecast_time(memory_plan, planned.batches, planned.steps, options.measure)
    if options.json:
        print(json.dumps(to_json(planned, time) | ({"ranks": scaling_to_json(scaling)} if scaling else {})))
        return
    print("\n".join(memory_lines(planned)))
    if time is not None:
        print("\n".join(time_lines(time)))
    if len(planned.fitted.trials) > 1:
        print("\n".join(trial_lines(planned.fitted, time)))
    if scaling:
        print("\n".join(scaling_lines(scaling, options.network or DEFAULT_NETWORK)))
    if error:
        log_line(f"warning: {error}")


def to_json(planned: "PlannedRun", time: "TimeForecast | str | None") -> dict[str, Any]:
    """Return a plan as JSON values."""
    from llamatrain.planner.cost import base_bytes_read

    memory_plan, forecast = planned.fitted.plan, None if time is None or isinstance(time, str) else time
    spec, trials = memory_plan.spec, planned.fitted.trials
    seconds = {
        "tokens_per_second": forecast and forecast.tokens_per_second,
        "seconds_of_step": forecast and forecast.step_seconds,
        "seconds": forecast and forecast.run_seconds,
        "speed_measured": forecast and forecast.speeds.measured_at,
        "speed_disturbed": forecast and forecast.speeds.disturbed,
    }
    trial_rows = [
        {
            "remat": str(trial.policy),
            "splits": trial.splits,
            "cache_base": trial.candidate.cache,
            "total": trial.total,
        }
        | {"cost": trial.cost / trials[-1].cost}
        for trial in (trials if len(trials) > 1 else ())
    ]
    return {
        **asdict(memory_plan.breakdown),
        "total": memory_plan.total,
        **({"on_host": memory_plan.breakdown.on_host} if memory_plan.own_memory else {}),
        "remat": str(memory_plan.policy),
        "batch": spec.batch,
        "splits": memory_plan.splits,
        "precision": spec.precision,
        "base_precision": "int8" if spec.int8 else "same",
        "cache_base": planned.fitted.cache,
        "threads": spec.threads,
        "parameters": spec.h.parameter_count,
        "adapter": planned.fitted.weights.adapter_sizes(spec.h),
        "base_read": base_bytes_read(memory_plan, planned.batches),
        **seconds,
        "tried": trial_rows,
    }


def memory_lines(planned: "PlannedRun") -> Iterator[str]:
    """Yield the lines about memory."""
    from llamatrain.model.lora_targets import describe_groups
    from llamatrain.planner.cost import base_bytes_read

    memory_plan = planned.fitted.plan
    spec = memory_plan.spec
    yield f"{spec.h.describe()}: {spec.h.parameter_count:,} parameters"
    if adapter := planned.fitted.weights.adapter_sizes(spec.h):
        yield f"an adapter of {sum(adapter.values()):,} parameters: {describe_groups(adapter)}"
    parts = f" in {memory_plan.splits} micro-batches each" if memory_plan.splits > 1 else ""
    rows = f"batches of {spec.batch * memory_plan.splits} rows{parts}"
    yield f"{spec.describe_precision()}, {spec.threads} threads, {rows}, recomputing: {memory_plan.policy}\n"
    totals = {"total": memory_plan.total}
    if memory_plan.own_memory:
        totals = {"on the device": memory_plan.total, "on the host": memory_plan.breakdown.on_host}
    for name, size in {**asdict(memory_plan.breakdown), **totals}.items():
        if size:
            yield f"{name.replace('_', ' '):14} {size:>18,}  {Size(size).text:>8}"
    if size := base_bytes_read(memory_plan, planned.batches):
        yield f"{'read':14} {size:>18,}  {Size(size).text:>8}  from the base's file in each step"


def time_lines(time: "TimeForecast | str") -> Iterator[str]:
    """Yield the lines about time."""
    if isinstance(time, str):
        yield f"\n{'time':14} {'unknown':>18}  {time}"
        return
    yield (
        f"\n{'tokens/s':14} {time.tokens_per_second:>18,.0f}  {format_step_time(time.step_seconds)} a "
        f"step of {time.tokens:,}"
    )
    if time.run_seconds is not None:
        yield (
            f"{'time':14} {format_duration(time.run_seconds):>18}  for {time.steps:,} steps, without "
            "validation, samples and saves"
        )
    yield from speed_lines(time.speeds)


def speed_lines(speeds: "OpSpeeds") -> Iterator[str]:
    """Yield the lines about the measurement that times are computed from."""
    yield f"Based on a speed test {format_age(speeds.measured_at)}; --measure repeats it."
    if speeds.disturbed:
        yield (
            f"Other programs ran (threads waited {speeds.disturbed:.0%} of the time), so it expires in ten "
            "minutes."
        )


def format_age(when: float) -> str:
    """Return roughly how long ago a time was."""
    minutes = int(max(0.0, clock() - when) // 60)
    count, unit = (minutes, "minute") if minutes < 60 else (minutes // 60, "hour")
    return f"{count} {unit}{'s' * (count > 1)} ago" if count else "just now"


def trial_lines(fitted: "FittedRun", time: "TimeForecast | str | None") -> Iterator[str]:
    """Yield a table of the plans that were tried, the fastest first; times are relative to the chosen plan."""
    *others, chosen = fitted.trials
    copies = {"bf16": "copied", "int8": "copied", "off": "as it is", "auto": ""}
    has_base = any(copies[trial.candidate.cache] for trial in fitted.trials)
    forecast = None if time is None or isinstance(time, str) else time
    head = f"\n{'recomputing':30} {'parts':>6} {'base' if has_base else '':>9} {'memory':>9} {'time':>7}"
    yield f"{head} {'a step':>8}" if forecast else head
    for trial in sorted([*others, chosen], key=lambda trial: trial.cost):
        factor = trial.cost / chosen.cost
        step = f"{format_step_time(forecast.step_seconds * factor):>9}" if forecast else ""
        remark = (
            "  chosen"
            if trial is chosen
            else "  does not fit"
            if fitted.memory_limit and trial.total > fitted.memory_limit
            else ""
        )
        row = (
            f"{trial.policy!s:30} {trial.splits:>6} "
            f"{copies[trial.candidate.cache] if has_base else '':>9} {Size(trial.total).text:>9}"
        )
        yield f"{row} {factor:>7.2f}{step}{remark}".rstrip()


def scaling_to_json(scaling: "ScalingForecast") -> dict[str, Any]:
    """Return a scaling forecast as JSON values."""
    rows = [
        {
            "ranks": row.ranks,
            "rows": row.rows,
            "seconds": row.seconds.total,
            "seconds_exposed": row.seconds.exposed,
        }
        | {"efficiency": row.efficiency, "efficiency_grown": row.weak_efficiency}
        for row in scaling.rows
    ]
    return {
        "count": scaling.step.ranks,
        "sent": scaling.sent_bytes,
        "received": scaling.sent_bytes,
        "pays": scaling.useful_ranks,
        "steps": rows,
    }


def scaling_lines(scaling: "ScalingForecast", network: Bandwidth) -> Iterator[str]:
    """Yield the lines of a scaling forecast."""
    from llamatrain.run.scaling import MESSAGE_SECONDS, SPREAD

    rows, size, last = scaling.rows[0].rows, Size(scaling.sent_bytes), scaling.rows[-1]
    for direction in ("sent", "received"):
        yield f"{direction:14} {size:>18,}  {size.text:>8}  by each of {scaling.step.ranks:,}, a step"
    yield ""
    yield from speed_lines(scaling.speeds)
    yield (
        f"Links of {network.words}, {MESSAGE_SECONDS * 1e6:.0f} µs a message, ranks whose speed differs "
        f"by {SPREAD * 100:.0f} %.\n"
    )
    yield (
        f"{'ranks':>6} {'rows':>7} {'seconds':>10} {'exposed':>9} {'efficiency':>11} "
        f"{f'with {rows:,} rows each':>22}"
    )
    for row in scaling.rows:
        share, strong, weak = (
            f"{100 * x:.0f} %"
            for x in (row.seconds.exposed / row.seconds.total, row.efficiency, row.weak_efficiency)
        )
        yield f"{row.ranks:>6,} {row.rows:>7,} {row.seconds.total:>10.4g} {share:>9} {strong:>11} {weak:>22}"
    ends = (
        f"{2 * scaling.useful_ranks:,} would be {scaling.next_speedup:.2f} times as fast"
        if scaling.next_speedup
        else "they cannot be divided further"
    )
    summary = (
        f"Up to {scaling.useful_ranks:,} ranks help" if scaling.useful_ranks > 1 else "More ranks do not help"
    )
    yield f"\n{summary} in steps of {rows:,} rows: {ends}."
    yield (
        f"With {rows:,} rows each, {last.ranks:,} ranks keep {100 * last.weak_efficiency:.0f} % of "
        "their speed."
    )


def print_graph(graphs: "StepGraphs", how: str) -> None:
    """Print the graph of a batch, or its memory."""
    from llamatrain.graph.printing import as_dot, as_text

    longest = graphs.largest
    if how == "memory":
        print(graphs.plan(longest).report())
    else:
        print({"text": as_text, "dot": as_dot}[how](longest.outputs))


def draw_memory_map(graphs: "StepGraphs", file: Path, title: str) -> None:
    """Draw the memory map to a file."""
    from llamatrain.report.memory_layout import MemoryLayout
    from llamatrain.report.memory_map import draw_svg
    from llamatrain.report.output_file import write_text

    if layout := MemoryLayout.from_plan(graphs.plan(graphs.largest)):
        write_text(file, draw_svg(layout, title))
        log_line(f"{file}: the memory map")
