"""Options in a TOML file: what a run was told, and what `--config` reads. Names are those of the command line."""

import json
import tomllib
from collections.abc import Collection, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from llamatrain.config.options import checked
from llamatrain.errors import FileError, UsageError

BASE = "base"  # the model that is tuned, which has no option either
DATA = "data"  # the files to train on, which have no option on the command line


def read_config(path: Path, *classes: type) -> dict[str, Any]:
    """The options in a file, by field name, each of its field's type."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from None
    try:
        found = tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as error:  # of TOML, of UTF-8, or a number of thousands of digits
        raise UsageError(f"{path}: no TOML: {error or type(error).__name__}") from None
    kinds = {name: get_args(hint)[0] for cls in classes for name, hint in get_type_hints(cls, include_extras=True).items()}
    kinds[DATA] = tuple[str, ...]
    values = {}
    for key, value in found.items():
        name = key.replace("-", "_")
        if name not in kinds:
            raise UsageError(f"{path}: the option {key!r} is unknown{like(name, list(kinds))}")
        values[name] = checked(value, kinds[name], f"{path}: {key}")
    return values


def like(name: str, known: list[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name, known, 1)
    return f"; did you mean {close[0].replace('_', '-')}?" if close else ""


def config_text(head: str, data: tuple[str, ...], options: Sequence[Any], idle: Collection[str], base: str = "") -> str:
    """A file of all options that are set and have an effect, under a comment."""
    lines = [f"# {line}" for line in head.splitlines()]
    if base:
        lines.append(f"{BASE} = {_toml(base)}")
    if data:
        lines.append(f"{DATA} = {_toml(list(data))}")
    for each in options:
        lines.append("")
        values = {field.name: getattr(each, field.name) for field in fields(each)}
        told = {name: value for name, value in values.items() if value is not None and name not in idle}
        lines += [f"{name.replace('_', '-')} = {_toml(value)}" for name, value in told.items()]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str | Path):  # JSON escapes as TOML does, but for one character
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(float(value)) if isinstance(value, float) else str(int(value))
