"""The command `llamatrain`: parses, calls, prints errors."""

import sys
from importlib import import_module

import click

import llamatrain
from llamatrain.errors import LlamatrainError

# Each is a module of this folder with a `command` and little to import at its head; the rest is loaded when it runs.
COMMANDS = ("inspect", "preview")


class Commands(click.Group):
    """Commands by the name of their module, imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f"llamatrain.cli.{cmd_name.replace('-', '_')}").command
        return command


@click.group(cls=Commands, invoke_without_command=True)
@click.version_option(llamatrain.__version__, message="%(prog)s %(version)s", help="Show the version.")
@click.pass_context
def app(context: click.Context) -> None:
    """Train llama models where the llama.cpp world keeps them: in GGUF files."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main() -> None:
    try:
        app(prog_name="llamatrain")
    except LlamatrainError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
