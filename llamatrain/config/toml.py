"""Options in a TOML file: what a run was told, and what `--config` reads. Names are those of the command line."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from llamatrain.config.flag_hints import answered
from llamatrain.config.messages import cut, nearest, worded
from llamatrain.config.options import Option, OptionError, Options, declared, plain, present_name
from llamatrain.config.read_limited import contents
from llamatrain.errors import UsageError

LONGEST = 1 << 20  # bytes: of all options at their longest, and many names of files


@dataclass(frozen=True)
class DataArgument(Options):
    """What has a place on the command line, and a name in a file only."""

    data: Annotated[tuple[str, ...], Option("The files to train on.")] = ()


@dataclass(frozen=True)
class BaseArgument(DataArgument):
    base: Annotated[str, Option("The model that is tuned.")] = ""


def read_config(path: Path, *classes: type[Options]) -> dict[str, Any]:
    """The options in a file, by field name, each of its field's type."""
    import tomllib

    raw = contents(path, LONGEST, "a file of options")
    try:
        found = tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as error:  # of TOML, of UTF-8, or a number of thousands of digits
        raise UsageError(
            f"{path}: no TOML: {cut(str(error)) or type(error).__name__}; options stand as in lr = 1e-4"
        ) from None
    options = {name: each for cls in classes for name, each in declared(cls).items()}
    values = {}
    for key, value in found.items():
        name = present_name(key.replace("-", "_"), *classes)
        name = name if name in options else f"{name}_"  # of a word that Python keeps for itself
        if isinstance(value, dict):
            raise UsageError(
                f"{path}: [{cut(key)}] begins a table; options stand by themselves, as in lr = 1e-4"
            )
        if name not in options and (other := answered(key)):
            raise UsageError(
                f"{path}: the option {worded(key)} is unknown{other.replace('; it is called --', '; it is called ')}"
            )
        if name not in options:
            raise UsageError(
                f"{path}: the option {worded(key)} is unknown{nearest(key, map(key_of, options))}"
            )
        try:
            values[name] = options[name].checked(value)
        except OptionError as error:
            raise UsageError(f"{path}: {error.words(key_of)}") from None
    return values


def key_of(name: str) -> str:
    return name.rstrip("_").replace("_", "-")


def told_there(name: str) -> str:
    """How an option is written in a file."""
    return f"{key_of(name.removeprefix('no_'))} = false" if name.startswith("no_") else key_of(name)


def config_text(
    head: str, data: tuple[str, ...], options: Sequence[Any], idle: Collection[str], base: str = ""
) -> str:
    """A file of all options that are set and have an effect, under a comment."""
    import tomli_w

    arguments = {"base": base, "data": list(data)}
    parts = [f"# {line}\n" for line in head.splitlines()]
    parts = ["".join(parts) + tomli_w.dumps({name: value for name, value in arguments.items() if value})]
    for each in options:
        told = {
            key_of(name): value
            for name, value in plain(each).items()
            if value is not None and name not in idle
        }
        parts.append(tomli_w.dumps(told))
    return "\n".join(parts)
