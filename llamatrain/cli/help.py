"""Formats `--help`: a panel for each purpose, as wide as the terminal."""

from collections.abc import Iterable
from inspect import cleandoc
from textwrap import wrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

MAX_WIDTH = 110
NARROW = 80  # columns: below, names have lines of their own
COLUMN = 30  # the most that names take of a line
NO_BREAK = "\N{NO-BREAK SPACE}"
OPTIONS = "Options"  # the panel of options without a purpose

Row = tuple[str, str, str]  # a name, what it takes, a sentence


def format_help(command: Any, context: Any) -> str:
    """Return the help of a command."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False, emoji=False, markup=False)
    console.width = min(console.width, MAX_WIDTH)
    with console.capture() as capture:
        usage = wrap(
            " ".join(["Usage:", context.command_path, *usage_words(command)]),
            console.width - 2,
            break_on_hyphens=False,
        )
        console.print("", *(f" {line}" for line in usage), "", sep="\n", style="bold")
        for paragraph in cleandoc(command.help or "").split("\n\n"):
            console.print(*(f" {line}" for line in wrap(paragraph, console.width - 2)), "", sep="\n")
        for title, rows in collect_panels(command, context).items():
            print_panel(console, title, rows)
    return capture.get().rstrip("\n")


def usage_words(command: Any) -> Iterable[str]:
    """Yield the words of the usage line."""
    yield "[OPTIONS]"
    for argument in arguments(command):
        name = argument.metavar + ("..." if argument.nargs < 0 else "")
        yield name if argument.required else f"[{name}]"
    if hasattr(command, "list_commands"):
        yield "COMMAND [ARGS]..."


def arguments(command: Any) -> list[Any]:
    """Return the arguments of a command."""
    return [param for param in command.params if param.param_type_name == "argument"]


def collect_panels(command: Any, context: Any) -> dict[str, list[Row]]:
    """Return rows by panel title: arguments, commands, then options by purpose."""
    panels: dict[str, list[Row]] = {
        "Arguments": [(param.metavar, "", param.help) for param in arguments(command) if param.help]
    }
    if hasattr(command, "list_commands"):
        panels["Commands"] = [command_row(name, command, context) for name in command.list_commands(context)]
    for param in command.get_params(context):
        if param.param_type_name == "option" and not param.hidden:
            panels.setdefault(param.rich_help_panel or OPTIONS, []).append(option_row(param))
    return {title: rows for title, rows in panels.items() if rows}


def command_row(name: str, group: Any, context: Any) -> Row:
    """Return the row of a subcommand."""
    also = "".join(f" Also called {other}." for other, target in group.aliases.items() if target == name)
    return name, "", " ".join(cleandoc(group.get_command(context, name).help).split("\n\n")[0].split()) + also


def option_row(option: Any) -> Row:
    """Return the row of an option."""
    # the negation of an option that is off by default only overrides a file
    shows_negation = option.is_flag and option.show_default
    names = ", ".join([*option.opts, *(option.secondary_opts if shows_negation else ())])
    remarks = [f"[default:{NO_BREAK}{option.show_default}]"] if isinstance(option.show_default, str) else []
    remarks += ["[required]"] if option.required else []
    return names, "" if option.is_flag else option.metavar or "", " ".join([option.help or "", *remarks])


def print_panel(console: "Console", title: str, rows: list[Row]) -> None:
    """Print a panel; on a narrow terminal sentences stand below names."""
    from rich.panel import Panel
    from rich.text import Text

    width = console.width - 4
    column = (
        0 if console.width < NARROW else min(COLUMN, 2 + max(len(f"{name} {unit}") for name, unit, _ in rows))
    )
    text = Text("\n").join(line for row in rows for line in format_row(row, column, width))
    console.print(Panel(text, title=title, title_align="left", border_style="dim"))


def format_row(row: Row, column: int, width: int) -> "Iterable[Text]":
    """Yield the lines of a row."""
    from rich.text import Text

    name, unit, sentence = row
    indent = column or 4
    words = [line.replace(NO_BREAK, " ") for line in wrap(sentence, width - indent, break_on_hyphens=False)]
    head = Text.assemble((name, "bold cyan"), " ", (unit, "yellow"))
    if column and len(head) + 2 <= column and words:
        head.append(" " * (column - len(head)) + words.pop(0))
    yield from (head, *(Text(" " * indent + line) for line in words))
