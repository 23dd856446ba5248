"""Options in TOML files: reading them for --config, and writing config.toml.

Names are those of the command line.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from llamatrain.config.flag_hints import suggest_option
from llamatrain.config.messages import quote, shorten, suggest
from llamatrain.config.options import Option, OptionError, Options, option_specs, plain, present_name
from llamatrain.config.read_limited import read_limited
from llamatrain.errors import UsageError

LONGEST = 1 << 20  # bytes: of all options at their longest, and many names of files


@dataclass(frozen=True)
class DataArgument(Options):
    """An argument that has a position on the command line, and a name only in files."""

    data: Annotated[tuple[str, ...], Option("The files to train on.")] = ()


@dataclass(frozen=True)
class BaseArgument(DataArgument):
    """The same for the base model."""

    base: Annotated[str, Option("The base model.")] = ""


def read_config(path: Path, *classes: type[Options]) -> dict[str, Any]:
    """Return the options in a file by field name, each in its field's type."""
    import tomllib

    raw = read_limited(path, LONGEST, "a config file")
    try:
        table = tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as error:  # of TOML, of UTF-8, or a number of thousands of digits
        raise UsageError(
            f"{path}: invalid TOML: {shorten(str(error)) or type(error).__name__}; write options as in "
            "lr = 1e-4",
            code="invalid-toml",
        ) from None
    options = {name: spec for cls in classes for name, spec in option_specs(cls).items()}
    values = {}
    for key, value in table.items():
        name = present_name(key.replace("-", "_"), *classes)
        name = name if name in options else f"{name}_"  # of a word that Python keeps for itself
        if isinstance(value, dict):
            raise UsageError(
                f"{path}: options must not be in tables (got [{shorten(key)}]); write them as in lr = 1e-4",
                code="invalid-toml",
            )
        if name not in options and (hint := suggest_option(key)):
            raise UsageError(
                f"{path}: unknown option {quote(key)}{hint.replace('; it is called --', '; it is called ')}",
                code="unknown-option",
            )
        if name not in options:
            raise UsageError(
                f"{path}: unknown option {quote(key)}{suggest(key, map(format_key, options))}",
                code="unknown-option",
            )
        try:
            values[name] = options[name].check(value)
        except OptionError as error:
            raise UsageError(f"{path}: {error.format(format_key)}", code=error.code) from None
    return values


def format_key(name: str) -> str:
    """Return the key of an option in a file."""
    return name.rstrip("_").replace("_", "-")


def format_setting(name: str) -> str:
    """Return how an option is written in a file."""
    return f"{format_key(name.removeprefix('no_'))} = false" if name.startswith("no_") else format_key(name)


def config_text(
    head: str, data: tuple[str, ...], options: Sequence[Any], omit: Collection[str], base: str = ""
) -> str:
    """Return the text of a file with all options that are set and have an effect, under a comment."""
    import tomli_w

    arguments = {"base": base, "data": list(data)}
    parts = [f"# {line}\n" for line in head.splitlines()]
    parts = ["".join(parts) + tomli_w.dumps({name: value for name, value in arguments.items() if value})]
    for part in options:
        settings = {
            format_key(name): value
            for name, value in plain(part).items()
            if value is not None and name not in omit
        }
        parts.append(tomli_w.dumps(settings))
    return "\n".join(parts)
