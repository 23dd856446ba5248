"""Signatures and docstrings of functions that take declared options as keywords."""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING
from textwrap import fill
from typing import Any, TypeVar

from llamatrain.config.options import Options, OptionSpec, declared, respelt

F = TypeVar("F", bound=Callable[..., Any])
WIDTH = 100


def documented(
    *classes: type[Options], defaults: Mapping[str, Any] | None = None, without: Collection[str] = ()
) -> Callable[[F], F]:
    """Show the options of these classes in a function's signature and docstring, where it has `**options`."""
    options = {name: each for cls in classes for name, each in declared(cls).items() if name not in without}
    usual = {name: each.default for name, each in options.items()} | dict(defaults or {})

    def show(function: F) -> F:
        own = [
            each
            for each in inspect.signature(function).parameters.values()
            if each.kind is not each.VAR_KEYWORD
        ]
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=of(usual[name]))
            for name in options
        ]
        function.__signature__ = inspect.signature(function).replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        told = "\n".join(line for name, each in options.items() for line in lines(name, each, usual[name]))
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\nOptions:\n{told}\n"
        return function

    return show


def of(default: Any) -> Any:
    return (
        inspect.Parameter.empty
        if default is MISSING
        else list(default)
        if isinstance(default, tuple)
        else default
    )


def lines(name: str, option: OptionSpec, default: Any) -> Iterator[str]:
    """An option in a docstring."""
    usual = "" if default in (MISSING, None, "", ()) else f" Default: {default!r}."
    choices = f" One of {', '.join(map(repr, option.choices))}." if option.choices else ""
    text = f"{name}: {sentence_of(option)}{choices}{usual}"
    yield fill(text, WIDTH, initial_indent="    ", subsequent_indent="        ", break_on_hyphens=False)


def sentence_of(option: OptionSpec) -> str:
    """What it does, with other options as keywords."""
    return respelt(
        option.option.sentence,
        lambda name: f"{name.removeprefix('no_')}=False" if name.startswith("no_") else name,
    )
