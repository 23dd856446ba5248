"""The command `llamatrain`: parses, calls, prints errors."""

import sys
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer

import llamatrain
from llamatrain.cli.typer_app import ALIASES, CommandGroup, offered, see_help
from llamatrain.config.flag_hints import suggest_option
from llamatrain.config.messages import shorten, suggest
from llamatrain.distributed import comm as together
from llamatrain.distributed import stderr
from llamatrain.distributed.comm import ExitStatus
from llamatrain.errors import LlamatrainError, describe
from llamatrain.platform.terminal import drop_stdout, show_log
from llamatrain.report.devnull import open_null

# Each is a module of this folder with a `command` and little to import at its head; the rest is loaded when it runs.
COMMANDS = (
    "doctor",
    "evaluate",
    "export-lora",
    "finetune",
    "from-scratch",
    "generate",
    "inspect",
    "plan",
    "preview",
    "report",
)
TOO_MUCH = {
    "generate": "; what to go on from is said by --prompt 'TEXT'",
    "export-lora": "; an adapter is named by --lora",
}


class AllCommands(CommandGroup):
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
    _: Annotated[
        bool, typer.Option("--version", "-V", callback=version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Train llama models where the llama.cpp world keeps them: in GGUF files."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    open_what_is_closed()
    aside()
    try:
        with show_log():
            code = typer.main.get_command(app).main(prog_name="llamatrain", standalone_mode=False)
            sys.stdout.flush()  # a reader that has left is met here, not while Python shuts down
            if compiled := sys.modules.get("llamatrain.compiler.cache"):
                compiled.code_cache.report()  # how long it took, if this was a first run
            together.wait_for_all()
    except (typer.Abort, KeyboardInterrupt):
        code = ended(ExitStatus("", 130))  # as shells have it: 128 and the signal's number
    except BrokenPipeError:
        drop_stdout()
        code = ended(ExitStatus("", 1))
    except (LlamatrainError, typer.TyperException, OSError, MemoryError, ImportError) as error:
        code = ended(ExitStatus(said(error), getattr(error, "exit_code", 1)), getattr(error, "shared", False))
    except Exception as error:
        if together.get_launch_info() is None:
            raise
        code = ended(together.exit_status_for(error))
    together.close(code or 0)
    sys.exit(code or 0)  # commands return nothing


def ended(failure: ExitStatus, shared: bool = False) -> int:
    """The exit code of a process that has failed, which says so unless another one does."""
    told = together.failure_to_print(failure, shared)
    if told and told.message:
        stderr.print_error(told.message)
    return told.exit_code if told else failure.exit_code


def aside() -> None:
    """Of several processes only the first prints; the others keep standard error for their last words."""
    if not together.is_printing_rank():
        stderr.set_stream(sys.stderr)
        sys.stdout, sys.stderr = open_null(), open_null()


def open_what_is_closed() -> None:
    """A process may be begun without one of its streams; Python then has nothing where everyone expects something."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open_null("r" if name == "stdin" else "w"))


def said(error: Exception) -> str:
    return misread(error) if isinstance(error, typer.TyperException) else describe(error)


def misread(error: typer.TyperException) -> str:
    """What typer says of a command line, as one sentence, and what would do."""
    near, words = "", error.format_message()
    if hasattr(error, "possibilities") and hasattr(error, "option_name"):  # there is no such option
        name, context = error.option_name, getattr(error, "ctx", None)
        known = [
            option
            for param in (context.command.params if context else ())
            for option in (*param.opts, *param.secondary_opts)
        ]
        words, near = f"no such option {shorten(name)}", suggest_option(name) or suggest(name, known)
    elif words.startswith("Got unexpected extra"):
        near = TOO_MUCH.get(getattr(getattr(error, "ctx", None), "info_name", ""), "")
    elif words.startswith("Missing option '--model'"):
        near = "; it names the model whose tokens are shown: llamatrain preview DATA --model MODEL"
    words = " ".join(words.split()).removesuffix(".")
    return words[:1].lower() + words[1:] + (near or see_help(getattr(error, "ctx", None)))
