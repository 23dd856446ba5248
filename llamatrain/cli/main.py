"""The command `llamatrain`: parses, calls, prints errors."""

import os
import sys
from contextlib import suppress
from importlib import import_module

import click

import llamatrain
from llamatrain.errors import LlamatrainError
from llamatrain.report.nowhere import nowhere
from llamatrain.report.printable import printable

# Each is a module of this folder with a `command` and little to import at its head; the rest is loaded when it runs.
COMMANDS = ("evaluate", "export-lora", "finetune", "from-scratch", "generate", "inspect", "plan", "preview")

ALIASES = {"train-from-scratch": "from-scratch", "finetune-lora": "finetune"}


class Commands(click.Group):
    """Commands by the name of their module, imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        cmd_name = ALIASES.get(cmd_name, cmd_name)
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
    open_what_is_closed()
    try:
        code = app(prog_name="llamatrain", standalone_mode=False)  # click would end an interrupt with 1, as if it were an error
        sys.stdout.flush()  # a reader that has left is met here, not while Python shuts down
        if compiled := sys.modules.get("llamatrain.machine.jit"):
            compiled.compiler.report()  # how long it took, if this was a first run
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = 130  # as shells have it: 128 and the signal's number
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be flushed
        code = 1
    except (LlamatrainError, OSError, MemoryError) as error:
        with suppress(OSError):  # nobody reads it
            print(f"error: {printable(said(error), sys.stderr.encoding)}", file=sys.stderr)
        code = error.exit_code if isinstance(error, LlamatrainError) else 1
    sys.exit(code or 0)  # commands return nothing


def open_what_is_closed() -> None:
    """A process may be begun without one of its streams; Python then has nothing where everyone expects something."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, nowhere("r" if name == "stdin" else "w"))


def said(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return f"not enough memory{f' ({error})' if str(error) else ''}; a smaller model, --ctx or --batch takes less"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error)
