"""`llamatrain plan`: what a run will take, before anything is loaded."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import date
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from llamatrain.cli.application import Command, Commands, application, options_of
from llamatrain.cli.finetune import Base
from llamatrain.cli.from_scratch import Data
from llamatrain.config.options import Checked, Option, OptionError, build
from llamatrain.config.shared import JSON
from llamatrain.config.units import Bandwidth, Size
from llamatrain.errors import MemoryPlanError
from llamatrain.machine.terminal import say
from llamatrain.recipe.options import PlaceOptions
from llamatrain.recipe.request import NEW, TUNING, TUNING_DEFAULTS, new_model, tuning

if TYPE_CHECKING:
    from llamatrain.recipe.request import Request
    from llamatrain.recipe.several import Foretold
    from llamatrain.train.graphs import RunGraphs

NETWORK = Bandwidth(1e10)


@dataclass(frozen=True)
class PlanOptions(Checked, panel="The plan"):
    json: Annotated[bool, replace(JSON, sentence="Print one JSON object: bytes by what they are for, and how it would run.")] = (
        False
    )
    graph: Annotated[
        Literal["text", "dot", "memory"] | None,
        Option(
            "Print the graph of a batch of the longest rows instead, as text or in Graphviz's language, or what its memory holds."
        ),
    ] = None
    ranks: Annotated[
        int | None,
        Option(
            "Plan for so many ranks, a machine like this one for each, and foretell a step of 1 to 4096.",
            unit="RANKS",
            least=1,
            most=4096,
            excludes=(("graph", "a graph is of one rank"),),
        ),
    ] = None
    network: Annotated[
        Bandwidth | None, Option("The link of each of these machines, such as 1Gbit; else 10Gbit. Takes --ranks.")
    ] = None

    def agree(self) -> None:
        if self.network is not None and self.ranks is None:
            raise OptionError(lambda spelt: f"{spelt('network')} means nothing without {spelt('ranks')}; leave it out")


command = application(cls=Commands, invoke_without_command=True)


@command.callback()
def plan(context: typer.Context) -> None:
    """What a run would take of memory: the same options as the run itself, and nothing is read, written or trained."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


@command.command("from-scratch", cls=Command)
@options_of(PlanOptions, PlaceOptions, *NEW)
def plan_from_scratch(data: Data = None, **said: Any) -> None:
    """Of `llamatrain from-scratch` with these options. Text is not read: a vocabulary to be learned counts in full."""
    show(new_model(data or (), said), build(PlanOptions, said))


@command.command("finetune", cls=Command)
@options_of(PlanOptions, PlaceOptions, *TUNING, defaults=TUNING_DEFAULTS)
def plan_finetune(base: Base = None, data: Data = None, **said: Any) -> None:
    """Of `llamatrain finetune` with these options. Of the base only its head is read."""
    show(tuning(base, data or (), said), build(PlanOptions, said))


def show(request: "Request", options: PlanOptions) -> None:
    from llamatrain.recipe.prepare import planned

    choice, asked, excess = planned(request, graphs=options.graph is not None, ranks=options.ranks or 0)
    if options.graph:
        print_graph(choice.graphs, options.graph)
        return
    if excess and request.asked.train.memory is not None:
        raise MemoryPlanError(excess)
    setting, told = choice.setting, None
    if options.ranks:
        from llamatrain.recipe.several import foretold

        told = foretold(choice, asked, options.network or NETWORK)
    bytes_ = {**asdict(choice.needs), "total": choice.total}
    how = {"remat": str(choice.policy), "batch": setting.batch, "splits": choice.splits, "precision": setting.precision}
    if options.json:
        several = {"ranks": of_ranks(told)} if told else {}
        print(json.dumps({**bytes_, **how, "threads": setting.threads, "parameters": setting.h.parameters, **several}))
        return
    print(f"{setting.h.describe()}: {setting.h.parameters:,} parameters")
    parts = f" in {choice.splits} parts each" if choice.splits > 1 else ""
    rows = f"batches of {setting.batch * choice.splits} rows{parts}"
    print(f"{setting.precision}, {setting.threads} threads, {rows}, recomputing: {choice.policy}\n")
    for name, size in bytes_.items():
        if size:
            print(f"{name.replace('_', ' '):14} {size:>18,}  {Size(size).words:>8}")
    if told:
        print("\n".join(lines_of(told, options.network or NETWORK)))
    if excess:
        say(f"warning: {excess}")


def of_ranks(told: "Foretold") -> dict[str, Any]:
    rows = [
        {"ranks": row.ranks, "rows": row.rows, "seconds": row.seconds.total, "seconds_exposed": row.seconds.exposed}
        | {"efficiency": row.efficiency, "efficiency_grown": row.grown}
        for row in told.rows
    ]
    return {"count": told.step.ranks, "sent": told.sent, "received": told.sent, "pays": told.pays, "steps": rows}


def lines_of(told: "Foretold", network: Bandwidth) -> Iterator[str]:
    """What is foretold, in words and a table."""
    from llamatrain.recipe.several import MESSAGE, SPREAD

    rows, size, last = told.rows[0].rows, Size(told.sent), told.rows[-1]
    for what in ("sent", "received"):
        yield f"{what:14} {size:>18,}  {size.words:>8}  by each of {told.step.ranks:,}, a step"
    yield f"\nForetold of this machine's speed, as it was on {date.fromtimestamp(told.when)}, not measured: links"
    yield f"of {network.words}, {MESSAGE * 1e6:.0f} µs a message, ranks that differ by {SPREAD * 100:.0f} %.\n"
    yield f"{'ranks':>6} {'rows':>7} {'seconds':>10} {'exposed':>9} {'efficiency':>11} {f'with {rows:,} rows each':>22}"
    for row in told.rows:
        share, own, grown = (f"{100 * x:.0f} %" for x in (row.seconds.exposed / row.seconds.total, row.efficiency, row.grown))
        yield f"{row.ranks:>6,} {row.rows:>7,} {row.seconds.total:>10.4g} {share:>9} {own:>11} {grown:>22}"
    ends = f"{2 * told.pays:,} would be {told.more:.2f} times as fast" if told.more else "they are divided no further"
    pays = f"Data-parallelism pays up to {told.pays:,} ranks" if told.pays > 1 else "More ranks do not pay"
    yield f"\n{pays} in steps of {rows:,} rows: {ends}."
    yield f"With {rows:,} rows for each, {last.ranks:,} ranks keep {100 * last.grown:.0f} % of their speed."


def print_graph(graphs: "RunGraphs", how: str) -> None:
    from llamatrain.graph.show import as_dot, as_text

    longest = graphs.longest
    if how == "memory":
        print(graphs.plan(longest).report())
    else:
        print({"text": as_text, "dot": as_dot}[how](longest.outputs))
