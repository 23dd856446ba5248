"""`llamatrain plan`: what a run will take, and how long, before anything is loaded."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import time as clock
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from llamatrain.cli.finetune import Base
from llamatrain.cli.from_scratch import Data
from llamatrain.cli.typer_app import CommandGroup, ReadOnlyCommand, application, options_of
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

NETWORK = Bandwidth(1e10)


@dataclass(frozen=True)
class PlanOptions(Options, panel="The plan"):
    json: Annotated[
        bool,
        replace(JSON, sentence="Print one JSON object: bytes by what they are for, and how it would run."),
    ] = False
    graph: Annotated[
        Literal["text", "dot", "memory"] | None,
        Option(
            "Print the graph of a batch of the longest rows instead, as text or in Graphviz's language, or what its memory holds."
        ),
    ] = None
    svg: Annotated[
        Path | None,
        Option(
            "Draw what the memory of a batch of the longest rows holds, call by call, into this file.",
            unit="FILE",
        ),
    ] = None
    ranks: Annotated[
        int | None,
        Option(
            "Plan for so many ranks, a machine like this one for each, and foretell a step of 1 to 4096.",
            unit="RANKS",
            least=1,
            most=4096,
            excludes=(("graph", "a graph is of one rank"), ("svg", "a memory map is of one rank")),
        ),
    ] = None
    measure: Annotated[
        bool,
        Option(
            "Measure how fast this machine is now, instead of using what was measured within the last day."
        ),
    ] = False
    network: Annotated[
        Bandwidth | None,
        Option("The link of each of these machines, such as 1Gbit; else 10Gbit. Takes --ranks."),
    ] = None

    def validate(self) -> None:
        if self.network is not None and self.ranks is None:
            raise OptionError(
                lambda spelt: f"{spelt('network')} means nothing without {spelt('ranks')}; leave it out"
            )


command = application(cls=CommandGroup, invoke_without_command=True)


@command.callback()
def plan(context: typer.Context) -> None:
    """What a run would take of memory and time: the same options as the run itself, and nothing is read, written or trained."""
    if context.invoked_subcommand is None:
        raise UsageError(
            "what to plan is missing: llamatrain plan from-scratch ... or llamatrain plan finetune ..."
        )


@command.command("from-scratch", cls=ReadOnlyCommand)
@options_of(PlanOptions, RunFolderOptions, *FROM_SCRATCH_OPTIONS)
def plan_from_scratch(data: Data = None, **said: Any) -> None:
    """Of `llamatrain from-scratch` with these options. Text is not read: a vocabulary to be learned counts in full."""
    show(request_from_scratch(data or (), said), build(PlanOptions, said))


@command.command("finetune", cls=ReadOnlyCommand)
@options_of(PlanOptions, RunFolderOptions, *FINETUNE_OPTIONS, defaults=FINETUNE_DEFAULTS)
def plan_finetune(base: Base = None, data: Data = None, **said: Any) -> None:
    """Of `llamatrain finetune` with these options. Of the base only its head is read."""
    show(request_finetune(base, data or (), said), build(PlanOptions, said))


def show(request: "RunRequest", options: PlanOptions) -> None:
    from llamatrain.report.output_file import check_output_file
    from llamatrain.run.prepare import plan_run

    if options.svg:
        check_output_file(options.svg)
    drawn = options.graph is not None or options.svg is not None
    found = plan_run(request, graphs=drawn, ranks=options.ranks or 0)
    way, excess, limit = found.plan.plan, found.plan.error, request.config.train.memory
    if options.svg:
        draw(way.graphs, options.svg, way.spec.h.describe())
    if options.graph:
        print_graph(way.graphs, options.graph)
        return
    if excess and limit is not None:
        raise MemoryPlanError(excess)
    told, time = None, None
    if options.ranks:
        from llamatrain.run.scaling import forecast_scaling

        told = forecast_scaling(way, found.config, options.network or NETWORK, options.measure)
    else:
        from llamatrain.planner.time import forecast_time

        time = forecast_time(way, found.batches, found.steps, options.measure)
    if options.json:
        print(json.dumps(in_json(found, time) | ({"ranks": of_ranks(told)} if told else {})))
        return
    print("\n".join(in_words(found)))
    if time is not None:
        print("\n".join(of_time(time)))
    if len(found.plan.trials) > 1:
        print("\n".join(of_tried(found.plan, time)))
    if told:
        print("\n".join(lines_of(told, options.network or NETWORK)))
    if excess:
        log_line(f"warning: {excess}")


def in_json(found: "PlannedRun", time: "TimeForecast | str | None") -> dict[str, Any]:
    way, told = found.plan.plan, None if time is None or isinstance(time, str) else time
    setting, tried = way.spec, found.plan.trials
    seconds = {
        "tokens_per_second": told and told.tokens_per_second,
        "seconds_of_step": told and told.step_seconds,
        "seconds": told and told.run_seconds,
        "speed_measured": told and told.speeds.measured_at,
        "speed_disturbed": told and told.speeds.disturbed,
    }
    ways = [
        {
            "remat": str(each.policy),
            "splits": each.splits,
            "cache_base": each.candidate.cache,
            "total": each.total,
        }
        | {"cost": each.cost / tried[-1].cost}
        for each in (tried if len(tried) > 1 else ())
    ]
    return {
        **asdict(way.breakdown),
        "total": way.total,
        "remat": str(way.policy),
        "batch": setting.batch,
        "splits": way.splits,
        "precision": setting.precision,
        "threads": setting.threads,
        "parameters": setting.h.parameter_count,
        **seconds,
        "tried": ways,
    }


def in_words(found: "PlannedRun") -> Iterator[str]:
    way = found.plan.plan
    setting = way.spec
    yield f"{setting.h.describe()}: {setting.h.parameter_count:,} parameters"
    parts = f" in {way.splits} parts each" if way.splits > 1 else ""
    rows = f"batches of {setting.batch * way.splits} rows{parts}"
    yield f"{setting.precision}, {setting.threads} threads, {rows}, recomputing: {way.policy}\n"
    for name, size in {**asdict(way.breakdown), "total": way.total}.items():
        if size:
            yield f"{name.replace('_', ' '):14} {size:>18,}  {Size(size).text:>8}"


def of_time(time: "TimeForecast | str") -> Iterator[str]:
    if isinstance(time, str):
        yield f"\n{'time':14} {'not foretold':>18}  {time}"
        return
    yield f"\n{'tokens/s':14} {time.tokens_per_second:>18,.0f}  {format_step_time(time.step_seconds)} a step of {time.tokens:,}"
    if time.run_seconds is not None:
        yield f"{'time':14} {format_duration(time.run_seconds):>18}  for {time.steps:,} steps, without validating, samples and saving"
    yield from of_speed(time.speeds)


def of_speed(speeds: "OpSpeeds") -> Iterator[str]:
    """Say what figures of time were computed from."""
    yield f"From this machine's speed, measured {ago(speeds.measured_at)}; --measure measures again."
    if speeds.disturbed:
        yield f"Other programs were at work (threads waited {speeds.disturbed:.0%} of the time); it serves for ten minutes."


def ago(when: float) -> str:
    """How long ago a time was, roughly."""
    minutes = int(max(0.0, clock() - when) // 60)
    count, unit = (minutes, "minute") if minutes < 60 else (minutes // 60, "hour")
    return f"{count} {unit}{'s' * (count > 1)} ago" if count else "just now"


def of_tried(fitted: "FittedRun", time: "TimeForecast | str | None") -> Iterator[str]:
    """The ways that were planned, the fastest first; each takes so many times as long as the one that is taken."""
    *others, taken = fitted.trials
    copies = {"bf16": "copied", "off": "as it is", "auto": ""}
    based = any(copies[each.candidate.cache] for each in fitted.trials)
    told = None if time is None or isinstance(time, str) else time
    head = f"\n{'recomputing':30} {'parts':>6} {'base' if based else '':>9} {'memory':>9} {'time':>7}"
    yield f"{head} {'a step':>8}" if told else head
    for each in sorted([*others, taken], key=lambda each: each.cost):
        factor = each.cost / taken.cost
        step = f"{format_step_time(told.step_seconds * factor):>9}" if told else ""
        here = (
            "  taken"
            if each is taken
            else "  too much"
            if fitted.memory_limit and each.total > fitted.memory_limit
            else ""
        )
        row = f"{each.policy!s:30} {each.splits:>6} {copies[each.candidate.cache] if based else '':>9} {Size(each.total).text:>9}"
        yield f"{row} {factor:>7.2f}{step}{here}".rstrip()


def of_ranks(told: "ScalingForecast") -> dict[str, Any]:
    rows = [
        {
            "ranks": row.ranks,
            "rows": row.rows,
            "seconds": row.seconds.total,
            "seconds_exposed": row.seconds.exposed,
        }
        | {"efficiency": row.efficiency, "efficiency_grown": row.weak_efficiency}
        for row in told.rows
    ]
    return {
        "count": told.step.ranks,
        "sent": told.sent_bytes,
        "received": told.sent_bytes,
        "pays": told.useful_ranks,
        "steps": rows,
    }


def lines_of(told: "ScalingForecast", network: Bandwidth) -> Iterator[str]:
    """What is foretold, in words and a table."""
    from llamatrain.run.scaling import MESSAGE_SECONDS, SPREAD

    rows, size, last = told.rows[0].rows, Size(told.sent_bytes), told.rows[-1]
    for what in ("sent", "received"):
        yield f"{what:14} {size:>18,}  {size.text:>8}  by each of {told.step.ranks:,}, a step"
    yield ""
    yield from of_speed(told.speeds)
    yield f"Links of {network.words}, {MESSAGE_SECONDS * 1e6:.0f} µs a message, ranks that differ by {SPREAD * 100:.0f} %.\n"
    yield f"{'ranks':>6} {'rows':>7} {'seconds':>10} {'exposed':>9} {'efficiency':>11} {f'with {rows:,} rows each':>22}"
    for row in told.rows:
        share, own, grown = (
            f"{100 * x:.0f} %"
            for x in (row.seconds.exposed / row.seconds.total, row.efficiency, row.weak_efficiency)
        )
        yield f"{row.ranks:>6,} {row.rows:>7,} {row.seconds.total:>10.4g} {share:>9} {own:>11} {grown:>22}"
    ends = (
        f"{2 * told.useful_ranks:,} would be {told.next_speedup:.2f} times as fast"
        if told.next_speedup
        else "they are divided no further"
    )
    pays = (
        f"Data-parallelism pays up to {told.useful_ranks:,} ranks"
        if told.useful_ranks > 1
        else "More ranks do not pay"
    )
    yield f"\n{pays} in steps of {rows:,} rows: {ends}."
    yield f"With {rows:,} rows for each, {last.ranks:,} ranks keep {100 * last.weak_efficiency:.0f} % of their speed."


def print_graph(graphs: "StepGraphs", how: str) -> None:
    from llamatrain.graph.printing import as_dot, as_text

    longest = graphs.largest
    if how == "memory":
        print(graphs.plan(longest).report())
    else:
        print({"text": as_text, "dot": as_dot}[how](longest.outputs))


def draw(graphs: "StepGraphs", file: Path, title: str) -> None:
    """The memory map."""
    from llamatrain.report.memory_layout import MemoryLayout
    from llamatrain.report.memory_map import draw_svg
    from llamatrain.report.output_file import write_text

    if arena := MemoryLayout.from_plan(graphs.plan(graphs.largest)):
        write_text(file, draw_svg(arena, title))
        log_line(f"{file}: the memory map")
