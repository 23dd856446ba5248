"""`llamatrain sweep`: trains with several values of some options and finds the best."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamatrain.cli.typer_app import Command, make_app, parse_path, with_options
from llamatrain.commands.sweep_grid import SweepOptions, specs_of, split_arguments
from llamatrain.config.options import build
from llamatrain.errors import UsageError
from llamatrain.platform.terminal import log_line

if TYPE_CHECKING:
    from llamatrain.commands.sweep_state import Sweep

command = make_app()
EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True}


@command.command(cls=Command, context_settings=EXTRA)
@with_options(SweepOptions)
def sweep(
    context: typer.Context,
    config: Annotated[str | None, typer.Argument(metavar="CONFIG", help="A config file.")] = None,
    **overrides: Any,
) -> None:
    """Train the run of CONFIG with several values of its options, and show which are best.

    Any option of from-scratch or finetune may follow, with several values: --lr 1e-4,3e-4 --lora-r 8,16. Every
    combination is a run. Data, and a base before them, may be given after CONFIG. All runs go on to the end of the
    first round; then the best third goes on, and so on, until the last round reaches the end of the run.
    """
    from llamatrain.commands.sweep import open_config, run_sweep, start_sweep, tell_how_to_resume
    from llamatrain.commands.sweep_result import PAGE, result_of
    from llamatrain.commands.sweep_state import read_sweep
    from llamatrain.run.signals import CommandInterrupts

    options = build(SweepOptions, overrides)
    words = list(context.args)
    if options.resume:
        if config or words:
            raise UsageError(
                "--resume DIR goes on with the sweep as it is; leave out the rest", code="unused-option"
            )
        folder, found = options.resume, read_sweep(options.resume)
    elif config is None:
        raise UsageError(
            "CONFIG is missing; use llamatrain sweep CONFIG --lr 1e-4,3e-4", code="missing-config"
        )
    else:
        first = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
        opened = open_config(parse_path(config), words[:first])
        folder, found = start_sweep(opened, split_arguments(words[first:], specs_of(opened.command)), options)
    if signal_number := run_sweep(folder, found, CommandInterrupts):
        tell_how_to_resume(folder)
        raise typer.Exit(128 + signal_number)
    print(
        json.dumps(asdict(result_of(folder, found)), default=str)
        if options.json
        else "\n".join(table_lines(found))
    )
    log_line(f"the best run: {folder / found.best[0].folder}; all runs: {folder / PAGE}")


def table_lines(sweep: "Sweep") -> list[str]:
    """Return the table of runs, the best first."""
    from llamatrain.commands.sweep_result import rows
    from llamatrain.report.sweep_page import loss_cells

    found = rows(sweep)
    names = list(dict.fromkeys(name for row in found for name in row.values))
    head = [*(name.replace("_", "-") for name in names), *(f"step {step:,}" for step in sweep.steps)]
    table = [
        head,
        *([row.values.get(name, "") for name in names] + loss_cells(sweep.steps, row) for row in found),
    ]
    widths = [max(len(cells[column]) for cells in table) for column in range(len(head))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in table
    ]
