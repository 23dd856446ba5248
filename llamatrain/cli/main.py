"""The command `llamatrain`: parses, calls, prints errors."""

import sys
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer

import llamatrain
from llamatrain.cli.application import ALIASES, Commands, offered, see_help
from llamatrain.config.words import cut, nearest, readable
from llamatrain.errors import LlamatrainError, words_of
from llamatrain.machine.printable import printable
from llamatrain.machine.terminal import shown, unread
from llamatrain.report.nowhere import nowhere

# Each is a module of this folder with a `command` and little to import at its head; the rest is loaded when it runs.
COMMANDS = ("evaluate", "export-lora", "finetune", "from-scratch", "generate", "inspect", "plan", "preview")


class AllCommands(Commands):
    """Commands by the name of their module, imported when they are asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return offered(COMMANDS, ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        cmd_name = ALIASES.get(cmd_name, cmd_name)
        return imported(cmd_name) if cmd_name in COMMANDS else None


@cache
def imported(name: str) -> Any:
    command = typer.main.get_command(import_module(f"llamatrain.cli.{name.replace('-', '_')}").command)
    command.name = name
    return command


app = typer.Typer(cls=AllCommands, invoke_without_command=True, rich_markup_mode=None)


def version(asked: bool) -> None:
    if asked:
        typer.echo(f"llamatrain {llamatrain.__version__}")
        raise typer.Exit


@app.callback()
def program(
    context: typer.Context,
    _: Annotated[bool, typer.Option("--version", callback=version, is_eager=True, help="Show the version.")] = False,
) -> None:
    """Train llama models where the llama.cpp world keeps them: in GGUF files."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    open_what_is_closed()
    try:
        with shown():
            code = typer.main.get_command(app).main(prog_name="llamatrain", standalone_mode=False)
            sys.stdout.flush()  # a reader that has left is met here, not while Python shuts down
            if compiled := sys.modules.get("llamatrain.machine.code"):
                compiled.code.report()  # how long it took, if this was a first run
    except (typer.Abort, KeyboardInterrupt):
        code = 130  # as shells have it: 128 and the signal's number
    except BrokenPipeError:
        unread()
        code = 1
    except (LlamatrainError, typer.TyperException, OSError, MemoryError) as error:
        with suppress(OSError):  # nobody reads it
            print(f"error: {readable(printable(said(error), sys.stderr.encoding))}", file=sys.stderr)
        code = getattr(error, "exit_code", 1)
    sys.exit(code or 0)  # commands return nothing


def open_what_is_closed() -> None:
    """A process may be begun without one of its streams; Python then has nothing where everyone expects something."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, nowhere("r" if name == "stdin" else "w"))


def said(error: Exception) -> str:
    return misread(error) if isinstance(error, typer.TyperException) else words_of(error)


def misread(error: typer.TyperException) -> str:
    """What typer says of a command line, as one sentence, and what would do."""
    near, words = "", error.format_message()
    if hasattr(error, "possibilities") and hasattr(error, "option_name"):  # there is no such option
        words, near = f"no such option {cut(error.option_name)}", nearest(error.option_name, error.possibilities or ())
    words = " ".join(words.split()).removesuffix(".")
    return words[:1].lower() + words[1:] + (near or see_help(getattr(error, "ctx", None)))
