"""What `--help` shows: a panel for each purpose, as wide as the terminal; where that is narrow, sentences stand under names."""

from collections.abc import Iterable
from inspect import cleandoc
from textwrap import wrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

WIDEST = 110
NARROW = 80  # columns: below, names have lines of their own
COLUMN = 30  # the most that names take of a line
KEPT = "\N{NO-BREAK SPACE}"
OPTIONS = "Options"  # of no purpose of their own

Row = tuple[str, str, str]  # a name, what it takes, a sentence


def page(command: Any, context: Any) -> str:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False, emoji=False, markup=False)
    console.width = min(console.width, WIDEST)
    with console.capture() as capture:
        usage = wrap(
            " ".join(["Usage:", context.command_path, *pieces(command)]),
            console.width - 2,
            break_on_hyphens=False,
        )
        console.print("", *(f" {line}" for line in usage), "", sep="\n", style="bold")
        for paragraph in cleandoc(command.help or "").split("\n\n"):
            console.print(*(f" {line}" for line in wrap(paragraph, console.width - 2)), "", sep="\n")
        for title, rows in panels(command, context).items():
            show(console, title, rows)
    return capture.get().rstrip("\n")


def pieces(command: Any) -> Iterable[str]:
    yield "[OPTIONS]"
    for each in arguments(command):
        name = each.metavar + ("..." if each.nargs < 0 else "")
        yield name if each.required else f"[{name}]"
    if hasattr(command, "list_commands"):
        yield "COMMAND [ARGS]..."


def arguments(command: Any) -> list[Any]:
    return [each for each in command.params if each.param_type_name == "argument"]


def panels(command: Any, context: Any) -> dict[str, list[Row]]:
    """Rows by the title of their panel: arguments first, then commands, the options by purpose, and the rest."""
    found: dict[str, list[Row]] = {
        "Arguments": [(each.metavar, "", each.help) for each in arguments(command) if each.help]
    }
    if hasattr(command, "list_commands"):
        found["Commands"] = [of_command(name, command, context) for name in command.list_commands(context)]
    for each in command.get_params(context):
        if each.param_type_name == "option" and not each.hidden:
            found.setdefault(each.rich_help_panel or OPTIONS, []).append(of_option(each))
    return {title: rows for title, rows in found.items() if rows}


def of_command(name: str, group: Any, context: Any) -> Row:
    also = "".join(f" Also called {other}." for other, meant in group.aliases.items() if meant == name)
    return name, "", " ".join(cleandoc(group.get_command(context, name).help).split("\n\n")[0].split()) + also


def of_option(option: Any) -> Row:
    on = (
        option.is_flag and option.show_default
    )  # the other form of what is off does nothing but overrule a file
    names = ", ".join([*option.opts, *(option.secondary_opts if on else ())])
    told = [f"[default:{KEPT}{option.show_default}]"] if isinstance(option.show_default, str) else []
    told += ["[required]"] if option.required else []
    return names, "" if option.is_flag else option.metavar or "", " ".join([option.help or "", *told])


def show(console: "Console", title: str, rows: list[Row]) -> None:
    from rich.panel import Panel
    from rich.text import Text

    width = console.width - 4
    column = (
        0 if console.width < NARROW else min(COLUMN, 2 + max(len(f"{name} {unit}") for name, unit, _ in rows))
    )
    text = Text("\n").join(line for row in rows for line in lines(row, column, width))
    console.print(Panel(text, title=title, title_align="left", border_style="dim"))


def lines(row: Row, column: int, width: int) -> "Iterable[Text]":
    from rich.text import Text

    name, unit, sentence = row
    indent = column or 4
    words = [line.replace(KEPT, " ") for line in wrap(sentence, width - indent, break_on_hyphens=False)]
    head = Text.assemble((name, "bold cyan"), " ", (unit, "yellow"))
    if column and len(head) + 2 <= column and words:
        head.append(" " * (column - len(head)) + words.pop(0))
    yield from (head, *(Text(" " * indent + line) for line in words))
