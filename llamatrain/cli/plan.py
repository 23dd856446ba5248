"""`llamatrain plan`: what a run will take, before anything is loaded."""

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from llamatrain.cli.application import Command, Commands, application, options_of
from llamatrain.cli.finetune import Base
from llamatrain.cli.from_scratch import Data
from llamatrain.config.options import Checked, Option, build
from llamatrain.config.shared import JSON
from llamatrain.config.units import Size
from llamatrain.errors import MemoryPlanError
from llamatrain.machine.terminal import say
from llamatrain.recipe.options import PlaceOptions
from llamatrain.recipe.request import NEW, TUNING, TUNING_DEFAULTS, new_model, tuning

if TYPE_CHECKING:
    from llamatrain.recipe.request import Request
    from llamatrain.train.graphs import RunGraphs


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

    choice, excess = planned(request, graphs=options.graph is not None)
    if options.graph:
        print_graph(choice.graphs, options.graph)
        return
    if excess and request.asked.train.memory is not None:
        raise MemoryPlanError(excess)
    setting = choice.setting
    bytes_ = {**asdict(choice.needs), "total": choice.total}
    how = {"remat": str(choice.policy), "batch": setting.batch, "splits": choice.splits, "precision": setting.precision}
    if options.json:
        print(json.dumps({**bytes_, **how, "threads": setting.threads, "parameters": setting.h.parameters}))
        return
    print(f"{setting.h.describe()}: {setting.h.parameters:,} parameters")
    parts = f" in {choice.splits} parts each" if choice.splits > 1 else ""
    rows = f"batches of {setting.batch * choice.splits} rows{parts}"
    print(f"{setting.precision}, {setting.threads} threads, {rows}, recomputing: {choice.policy}\n")
    for name, size in bytes_.items():
        if size:
            print(f"{name.replace('_', ' '):14} {size:>18,}  {Size(size).words:>8}")
    if excess:
        say(f"warning: {excess}")


def print_graph(graphs: "RunGraphs", how: str) -> None:
    from llamatrain.graph.show import as_dot, as_text

    longest = graphs.longest
    if how == "memory":
        print(graphs.plan(longest).report())
    else:
        print({"text": as_text, "dot": as_dot}[how](longest.outputs))
