"""`llamatrain doctor`: shows what this machine has, what is cached, and what is broken."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamatrain.cli.typer_app import Command, make_app, with_options
from llamatrain.config.common import JSON
from llamatrain.config.options import Option, Options, build
from llamatrain.platform.escape import make_printable

if TYPE_CHECKING:
    from llamatrain.commands.doctor.problems import Problem
    from llamatrain.commands.doctor.system import SystemReport

command = make_app()


@dataclass(frozen=True)
class DoctorOptions(Options):
    """Options of `doctor`."""

    json: Annotated[
        bool, replace(JSON, sentence="Print one JSON object: an object for each section, and findings.")
    ] = False
    clean: Annotated[bool, Option("First remove kernels of other versions and cached tokens.")] = False


@command.command(cls=Command)
@with_options(DoctorOptions)
def doctor(**overrides: Any) -> None:
    """Show what this machine has and what llamatrain keeps on it: processor, kernels, threads, memory, caches, versions.

    Ends with 1 where something is broken, and says of each finding what would do. Nothing is compiled or
    trained.
    """
    from llamatrain.commands.doctor.system import examine

    options = build(DoctorOptions, overrides)
    report = examine(options.clean)
    if options.json:
        print(json.dumps(to_json(report)))
    elif sys.stdout.isatty():
        draw(report)
    else:
        for line in to_lines(report):
            print(make_printable(line, sys.stdout.encoding, keep="\t"))
    if report.findings:
        raise typer.Exit(1)


def to_json(report: "SystemReport") -> dict[str, Any]:
    """Return a report as JSON values."""
    sections = {
        title.replace(" ", "_"): {finding.name.replace(" ", "_"): finding.value for finding in rows}
        for title, rows in report.sections.items()
    }
    return {
        **sections,
        "findings": [{"what": finding.problem, "cure": finding.remedy} for finding in report.findings],
    }


def to_lines(report: "SystemReport") -> Iterator[str]:
    """Yield a report as lines of section, name and text, separated by tabs."""
    for title, rows in report.sections.items():
        yield from (f"{title}\t{finding.name}\t{finding.text}" for finding in rows)
    yield from (
        f"findings\t{number}\t{format_finding(finding)}" for number, finding in enumerate(report.findings, 1)
    )


def draw(report: "SystemReport") -> None:
    """Print a report as tables."""
    from llamatrain.cli.inspect import make_console, print_table

    console = make_console()
    for title, rows in report.sections.items():
        print_table(console, title, [(row.name, row.text) for row in rows])
    findings = [(str(number), format_finding(finding)) for number, finding in enumerate(report.findings, 1)]
    print_table(console, "findings", findings or [("none", "nothing is broken")])


def format_finding(finding: "Problem") -> str:
    """Return a problem and its remedy as one text."""
    return "; ".join(filter(None, finding))
