"""Options made from dataclass fields, so that each is declared once: for the command line, the config file and checkpoints.

A field reads `ctx: Annotated[int, "Tokens in a row."] = 128` and becomes `--ctx`; a name of one letter becomes `-n`.
    bool              --name / --no-name
    Literal[...]      one of these words
    T | None          T, or not given
    tuple[T, ...]     may be repeated; with T = tuple[A, B] each time takes two values
    Size, Duration    as config.units reads them
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import click

from llamatrain.config.units import Duration, Size
from llamatrain.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class Written(click.ParamType):
    """A size or a time."""

    def __init__(self, kind: type[Size] | type[Duration]) -> None:
        self.kind, self.name = kind, kind.__name__.lower()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return value if isinstance(value, self.kind) else self.kind.parse(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)


class PathText(click.Path):
    """A path; an empty one, as of a variable that is not set, would be the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("an empty path", param, ctx)
        return super().convert(value, param, ctx)


def options_of(*classes: type, defaults: Mapping[str, Any] | None = None) -> Callable[[F], F]:
    """A decorator that gives a click command one option for each field of these dataclasses; some with another default."""
    others = defaults or {}

    def add(command: F) -> F:
        for cls in reversed(classes):
            hints = get_type_hints(cls, include_extras=True)
            for field in reversed(fields(cls)):
                command = make_option(field.name, hints[field.name], others.get(field.name, field.default))(command)
        return command

    return add


def flag_of(name: str) -> str:
    return f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}"


def make_option(name: str, hint: Any, default: Any) -> Callable[[F], F]:
    kind, sentence = get_args(hint)
    flag = flag_of(name)
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
    if kind in (Size, Duration):
        return {"type": Written(kind)}
    return {"type": PathText(path_type=Path) if kind is Path else kind}


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """A dataclass from the values that click hands to a command, which may hold those of other classes too."""
    names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: value for name, value in values.items() if name in names})


# ---- plain values, for files -----------------------------------------------


def plain(options: Any) -> dict[str, Any]:
    """The fields of a dataclass as JSON and TOML have them."""
    return {name: _plain(value) for name, value in asdict(options).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def from_plain(cls: type[T], values: Mapping[str, Any], source: object) -> T:
    """The dataclass again; what is missing has its default. The file that they come from may be broken."""
    hints = get_type_hints(cls, include_extras=True)
    taken = {}
    for field in fields(cls):  # type: ignore[arg-type]
        if field.name in values:
            taken[field.name] = checked(values[field.name], get_args(hints[field.name])[0], f"{source}: {field.name}")
    return cls(**taken)


def checked(value: Any, kind: Any, what: str) -> Any:
    """A value of a file as a field's type has it; a whole number will do for a float or a text, and nothing else."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        inner = next(arg for arg in args if arg is not type(None))
        return None if value is None else checked(value, inner, what)
    if origin is Literal:
        if value not in args:
            raise UsageError(f"{what} is {value!r}; it takes {', '.join(map(str, args))}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise UsageError(f"{what} is {value!r}; it takes a list")
        kinds = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
        if len(kinds) != len(value):
            raise UsageError(f"{what} has {len(value)} values; it takes {len(kinds)}")
        return tuple(checked(item, each, what) for item, each in zip(value, kinds, strict=True))
    if isinstance(value, int | float) and not abs(value) < 2**63:  # nor infinite, nor NaN
        raise UsageError(f"{what} is too large, or no number")
    if isinstance(value, str) and "\0" in value:
        raise UsageError(f"{what} has a zero character in it")
    if kind in (Size, Duration) and isinstance(value, int | float | str) and not isinstance(value, bool):
        return kind.parse(int(value) if kind is Size and isinstance(value, int | float) else value)
    accepted = {float: (int, float), str: (str, int), Path: (str,)}.get(kind, (kind,))
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", Path: "a path"}
        raise UsageError(f"{what} is {value!r}; it takes {names.get(kind, 'a ' + kind.__name__)}")
    return kind(value)
