"""The command `llamatrain`: parses, calls, prints errors."""

import sys
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer

import llamatrain
from llamatrain.cli.typer_app import ALIASES, CommandGroup, command_names, see_help
from llamatrain.config.flag_hints import suggest_option
from llamatrain.config.messages import shorten, suggest
from llamatrain.distributed import comm as together
from llamatrain.distributed import stderr
from llamatrain.distributed.comm import ExitStatus
from llamatrain.errors import LlamatrainError, describe
from llamatrain.platform.terminal import discard_output, flush_or_discard, show_log
from llamatrain.report.devnull import open_null

# Each is a module of this folder with a `command` and little to import at its head; the rest is loaded when
# it runs.
COMMANDS = (
    "control-vector",
    "doctor",
    "evaluate",
    "export-lora",
    "extract-lora",
    "finetune",
    "from-scratch",
    "generate",
    "imatrix",
    "import",
    "inspect",
    "merge",
    "plan",
    "preview",
    "push",
    "report",
    "sweep",
    "ui",
)
MODULES = {"import": "import_model"}  # of commands whose names cannot be those of modules
EXTRA_ARGUMENT_HINTS = {
    "generate": "; give the prompt with --prompt 'TEXT'",
    "export-lora": "; name an adapter with --lora",
}


class AllCommands(CommandGroup):
    """Commands by the name of their module, which is imported when it is needed."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return command_names(COMMANDS, ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by its name or another name of it."""
        cmd_name = ALIASES.get(cmd_name, cmd_name)
        return load_command(cmd_name) if cmd_name in COMMANDS else None


@cache
def load_command(name: str) -> Any:
    """Import a command."""
    module = MODULES.get(name, name.replace("-", "_"))
    command = typer.main.get_command(import_module(f"llamatrain.cli.{module}").command)
    command.name = name
    return command


app = typer.Typer(cls=AllCommands, invoke_without_command=True, rich_markup_mode=None)


def print_version(asked: bool) -> None:
    """Print the version and exit."""
    if asked:
        typer.echo(f"llamatrain {llamatrain.__version__}")
        raise typer.Exit


@app.callback()
def program(
    context: typer.Context,
    _: Annotated[
        bool, typer.Option("--version", "-V", callback=print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Train and fine-tune language models in GGUF files."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Run a command, and exit with its code."""
    open_missing_streams()
    silence_followers()
    try:
        with show_log():
            code = typer.main.get_command(app).main(prog_name="llamatrain", standalone_mode=False)
            sys.stdout.flush()  # a reader that has left is met here, not while Python shuts down
            if compiled := sys.modules.get("llamatrain.compiler.cache"):
                compiled.code_cache.report()  # how long it took, if this was a first run
            together.wait_for_all()
    except (typer.Abort, KeyboardInterrupt):
        code = report_failure(ExitStatus("", 130))  # as in shells: 128 + the signal's number
    except BrokenPipeError:
        discard_output(sys.stdout)
        code = report_failure(ExitStatus("", 1))
    except (LlamatrainError, typer.TyperException, OSError, MemoryError, ImportError) as error:
        code = report_failure(
            ExitStatus(format_error(error), getattr(error, "exit_code", 1)), getattr(error, "shared", False)
        )
    except Exception as error:
        if together.get_launch_info() is None:
            raise
        code = report_failure(together.exit_status_for(error))
    together.close(code or 0)
    flush_or_discard(sys.stderr)
    sys.exit(code or 0)  # commands return nothing


def report_failure(failure: ExitStatus, shared: bool = False) -> int:
    """Return the exit code of a failed process. The first process that failed prints the error."""
    first_failure = together.failure_to_print(failure, shared)
    if first_failure and first_failure.message:
        stderr.print_error(first_failure.message)
    return first_failure.exit_code if first_failure else failure.exit_code


def silence_followers() -> None:
    """Silence all processes but the first; they keep standard error for fatal errors."""
    if not together.is_printing_rank():
        stderr.set_stream(sys.stderr)
        sys.stdout, sys.stderr = open_null(), open_null()


def open_missing_streams() -> None:
    """Open standard streams that the process was started without; Python has None in their place."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open_null("r" if name == "stdin" else "w"))


def format_error(error: Exception) -> str:
    """Return the message of an error."""
    return format_usage_error(error) if isinstance(error, typer.TyperException) else describe(error)


def format_usage_error(error: typer.TyperException) -> str:
    """Return typer's message about a command line as one sentence with a hint and a code."""
    hint, code, message = "", "invalid-option", error.format_message()
    context = getattr(error, "ctx", None)
    if hasattr(error, "possibilities") and hasattr(error, "option_name"):  # there is no such option
        name, code = error.option_name, "unknown-option"
        options = [
            option
            for param in (context.command.params if context else ())
            for option in (*param.opts, *param.secondary_opts)
        ]
        message, hint = f"no such option {shorten(name)}", suggest_option(name) or suggest(name, options)
    elif message.startswith("Got unexpected extra"):
        hint, code = EXTRA_ARGUMENT_HINTS.get(getattr(context, "info_name", ""), ""), "unexpected-argument"
    elif message.startswith("Missing"):
        code = "missing-option" if message.startswith("Missing option") else "missing-argument"
        if "'--model'" in message:
            hint = "; give the model whose tokens are shown: llamatrain preview DATA --model MODEL"
    message = " ".join(message.split()).removesuffix(".")
    return f"{message[:1].lower()}{message[1:]}{hint or see_help(context)} [{code}]"
