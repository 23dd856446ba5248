"""Signatures and docstrings of functions that take declared options as keywords."""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING
from textwrap import fill
from typing import Any, TypeVar

from llamatrain.config.options import Options, OptionSpec, option_specs, replace_flags

F = TypeVar("F", bound=Callable[..., Any])
WIDTH = 100


def document_options(
    *classes: type[Options], defaults: Mapping[str, Any] | None = None, without: Collection[str] = ()
) -> Callable[[F], F]:
    """Show the options of these classes in a function's signature and docstring, in place of `**options`."""
    options = {
        name: spec for cls in classes for name, spec in option_specs(cls).items() if name not in without
    }
    default_of = {name: spec.default for name, spec in options.items()} | dict(defaults or {})

    def show(function: F) -> F:
        own = [
            parameter
            for parameter in inspect.signature(function).parameters.values()
            if parameter.kind is not parameter.VAR_KEYWORD
        ]
        more = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=parameter_default(default_of[name])
            )
            for name in options
        ]
        function.__signature__ = inspect.signature(function).replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        text = "\n".join(
            line
            for name, parameter in options.items()
            for line in describe_option(name, parameter, default_of[name])
        )
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\nOptions:\n{text}\n"
        return function

    return show


def parameter_default(default: Any) -> Any:
    """Return the default of an option as a parameter shows it."""
    return (
        inspect.Parameter.empty
        if default is MISSING
        else list(default)
        if isinstance(default, tuple)
        else default
    )


def describe_option(name: str, option: OptionSpec, default: Any) -> Iterator[str]:
    """Yield the lines that describe an option in a docstring."""
    default_text = "" if default in (MISSING, None, "", ()) else f" Default: {default!r}."
    choices = f" One of {', '.join(map(repr, option.choices))}." if option.choices else ""
    text = f"{name}: {sentence_for(option)}{choices}{default_text}"
    yield fill(text, WIDTH, initial_indent="    ", subsequent_indent="        ", break_on_hyphens=False)


def sentence_for(option: OptionSpec) -> str:
    """Return the sentence of an option, with other options named as keywords."""
    return replace_flags(
        option.option.sentence,
        lambda name: f"{name.removeprefix('no_')}=False" if name.startswith("no_") else name,
    )
