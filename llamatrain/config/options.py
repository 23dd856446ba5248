"""Command-line options made from dataclass fields, so that each option is declared once.

A field reads `ctx: Annotated[int, "Tokens in a row."] = 128` and becomes `--ctx`; a name of one letter becomes `-n`.
    bool              --name / --no-name
    Literal[...]      one of these words
    T | None          T, or not given
    tuple[T, ...]     may be repeated; with T = tuple[A, B] each time takes two values
"""

from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import click

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def options_of(*classes: type) -> Callable[[F], F]:
    """A decorator that gives a click command one option for each field of these dataclasses."""

    def add(command: F) -> F:
        for cls in reversed(classes):
            hints = get_type_hints(cls, include_extras=True)
            for field in reversed(fields(cls)):
                command = make_option(field.name, hints[field.name], field.default)(command)
        return command

    return add


def make_option(name: str, hint: Any, default: Any) -> Callable[[F], F]:
    kind, sentence = get_args(hint)
    flag = f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}"
    required = default is MISSING
    settings: dict[str, Any] = {
        "help": sentence,
        "required": required,
        "show_default": default not in ("", (), None) and default is not False,
    }
    if not required:
        settings["default"] = default
    if kind is bool:
        return click.option(f"{flag}/--no-{name.replace('_', '-')}", name, **settings)
    return click.option(flag, name, **settings, **click_type(kind))


def click_type(kind: Any) -> dict[str, Any]:
    """How click is told of a field's type."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return {"type": click.Choice(args)}
    if origin in (Union, UnionType):
        return click_type(next(arg for arg in args if arg is not type(None)))
    if origin is tuple and args[-1] is Ellipsis:
        return {**click_type(args[0]), "multiple": True}
    if origin is tuple:
        return {"type": tuple(click_type(arg)["type"] for arg in args)}
    return {"type": click.Path(path_type=Path) if kind is Path else kind}


def build(cls: type[T], values: dict[str, Any]) -> T:
    """A dataclass from the values that click hands to a command, which may hold those of other classes too."""
    names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: value for name, value in values.items() if name in names})
