"""The command `llamatrain`: parses, calls, prints errors."""

import sys
from typing import Annotated

import typer

import llamatrain
from llamatrain.errors import LlamatrainError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"llamatrain {llamatrain.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def command(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    """Train llama models where the llama.cpp world keeps them: in GGUF files."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    try:
        app(prog_name="llamatrain")
    except LlamatrainError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
