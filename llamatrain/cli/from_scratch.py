"""`llamatrain from-scratch`: trains a new model from text, or from the built-in sine wave."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamatrain.cli.typer_app import MultiProcessCommand, make_app, with_options
from llamatrain.platform.terminal import quiet
from llamatrain.run.options import RunFolderOptions
from llamatrain.run.request import FROM_SCRATCH_OPTIONS, request_from_scratch

if TYPE_CHECKING:
    from llamatrain.run.request import RunRequest

Data = Annotated[list[str] | None, typer.Argument(metavar="DATA")]
command = make_app()


@command.command(cls=MultiProcessCommand)
@with_options(RunFolderOptions, *FROM_SCRATCH_OPTIONS)
def from_scratch(data: Data = None, **overrides: Any) -> None:
    """Train a new llama on DATA; without any, on the built-in sine wave.

    DATA are files (text, JSON, CSV, Parquet), folders, globs, or - for standard input. The model is written
    as a GGUF file that llama.cpp runs, into the folder of the run, next to checkpoints, options and metrics.
    """
    run_request(request_from_scratch(data or (), overrides))


def run_request(request: "RunRequest") -> None:
    """Train; if a signal ended the run, exit with the code of the signal."""
    from llamatrain.run.signals import CommandInterrupts
    from llamatrain.run.train import train

    with quiet(request.folder_options.quiet):
        signal_number = train(request, CommandInterrupts()).stop.signal
        if request.folder_options.quiet and (compiled := sys.modules.get("llamatrain.compiler.cache")):
            compiled.code_cache.report()  # while quiet, so that main() does not print it later
    if signal_number:
        raise typer.Exit(128 + signal_number)
