"""`llamatrain doctor`: what this machine has, what llamatrain keeps on it, and what is broken."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamatrain.cli.typer_app import Command, application, options_of
from llamatrain.config.common import JSON
from llamatrain.config.options import Option, Options, build
from llamatrain.platform.escape import make_printable

if TYPE_CHECKING:
    from llamatrain.commands.doctor.problems import Problem
    from llamatrain.commands.doctor.system import SystemReport

command = application()


@dataclass(frozen=True)
class DoctorOptions(Options):
    json: Annotated[
        bool, replace(JSON, sentence="Print one JSON object: an object for each section, and findings.")
    ] = False
    clean: Annotated[
        bool, Option("First remove kernels of other versions and kept tokens, and say how much that was.")
    ] = False


@command.command(cls=Command)
@options_of(DoctorOptions)
def doctor(**said: Any) -> None:
    """Show what this machine has and what llamatrain keeps on it: processor, kernels, threads, memory, caches, versions.

    Ends with 1 where something is broken, and says of each finding what would do. Nothing is compiled or trained.
    """
    from llamatrain.commands.doctor.system import examined

    options = build(DoctorOptions, said)
    found = examined(options.clean)
    if options.json:
        print(json.dumps(facts(found)))
    elif sys.stdout.isatty():
        draw(found)
    else:
        for line in lines(found):
            print(make_printable(line, sys.stdout.encoding, keep="\t"))
    if found.findings:
        raise typer.Exit(1)


def facts(found: "SystemReport") -> dict[str, Any]:
    told = {
        title.replace(" ", "_"): {each.name.replace(" ", "_"): each.value for each in rows}
        for title, rows in found.sections.items()
    }
    return {**told, "findings": [{"what": each.what, "cure": each.cure} for each in found.findings]}


def lines(found: "SystemReport") -> Iterator[str]:
    """Section, name and what is said of it, between tabs."""
    for title, rows in found.sections.items():
        yield from (f"{title}\t{each.name}\t{each.words}" for each in rows)
    yield from (f"findings\t{number}\t{in_words(each)}" for number, each in enumerate(found.findings, 1))


def draw(found: "SystemReport") -> None:
    from llamatrain.cli.inspect import console_of, show

    console = console_of()
    for title, rows in found.sections.items():
        show(console, title, [(each.name, each.words) for each in rows])
    broken = [(str(number), in_words(each)) for number, each in enumerate(found.findings, 1)]
    show(console, "findings", broken or [("none", "nothing is broken")])


def in_words(finding: "Problem") -> str:
    return "; ".join(filter(None, finding))
