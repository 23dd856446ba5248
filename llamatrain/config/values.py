"""Converts and checks option values by type."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from llamatrain.config.messages import quote, suggest
from llamatrain.config.units import Bandwidth, Duration, Size
from llamatrain.errors import UsageError

LARGEST = 1 << 63  # of sizes and times
GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+")
NUMBER = re.compile(rf"({GROUPED.pattern}|[0-9]{{1,15}}(?:[.,][0-9]{{0,15}})?(?:e[0-9]{{1,2}})?)([kKmM%]?)")
MANY = {"k": 1024, "m": 1 << 20}
# What a value is called where its option has no name of its own for it, and what it takes.
UNITS = {
    bool: "",
    int: "NUMBER",
    float: "NUMBER",
    str: "TEXT",
    Path: "FILE",
    Size: "SIZE",
    Duration: "TIME",
    Bandwidth: "SPEED",
}
NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
    Size: "a size, such as 6GB",
    Duration: "a time, such as 90m",
    Bandwidth: "a speed, such as 10Gbit",
}


def parse(text: Any, kind: Any) -> Any:
    """Convert the text of a command line, or a tuple of texts."""
    if get_origin(kind) is tuple:
        return tuple(parse(item, part) for item, part in zip(text, get_args(kind), strict=True))
    if kind in (int, float):
        return kind(text)  # ValueError
    return Path(text) if kind is Path and text else text


def suggest_value(value: Any, kind: Any, choices: Sequence[str] = ()) -> str:
    """Return a hint for what was probably meant.

    Known slips are a number with a comma, a unit or a percent sign, and a misspelled word.
    """
    if not isinstance(value, str):
        return ""
    if choices:
        return suggest(value.lower(), choices)
    match = NUMBER.fullmatch(value.strip())
    if kind not in (int, float) or not match or value.isdecimal():
        return ""
    digits, unit = match.groups()
    grouped = GROUPED.fullmatch(digits)
    number = float(digits.replace(",", "") if grouped and kind is int else digits.replace(",", "."))
    number = number / 100 if unit == "%" else number * MANY.get(unit.lower(), 1)
    if kind is int and (number % 1 or number > 1e15):
        return ""
    return f"; write {int(number) if kind is int else f'{number:g}'}"


def convert(value: Any, kind: Any) -> Any:
    """Return a value in a type: a whole number becomes a float or a text, a text becomes a path, little else."""
    if get_origin(kind) is Literal:
        return require(isinstance(value, str) and value in get_args(kind), value)
    if get_origin(kind) is tuple:
        require(isinstance(value, list | tuple) and len(value) == len(get_args(kind)), value)
        return tuple(convert(item, part) for item, part in zip(value, get_args(kind), strict=True))
    if kind in (Size, Duration, Bandwidth):
        require(isinstance(value, int | float | str) and not isinstance(value, bool), value)
        require(isinstance(value, str) or abs(value) < LARGEST, value)  # nor is NaN
        return (
            value
            if isinstance(value, kind)
            else kind.parse(int(value) if kind is Size and not isinstance(value, str) else value)
        )
    accepted = {float: (int, float), str: (str, int), Path: (str, Path)}.get(kind, kind)
    require(isinstance(value, accepted) and (kind is bool or not isinstance(value, bool)), value)
    require(kind is not float or abs(value) <= sys.float_info.max, value)  # nor is NaN
    require(not isinstance(value, str | Path) or "\0" not in str(value), value)
    require(kind is not Path or is_valid_path(str(value)), value)
    if kind is Path and value == "":  # as of a variable that is not set: it would be the current folder
        raise UsageError("the path is empty", code="invalid-option")
    return value if isinstance(value, kind) else kind(value)


def is_valid_path(place: str | bytes) -> bool:
    """Return True if a file may have this name."""
    try:
        return b"\0" not in os.fsencode(place)
    except UnicodeEncodeError:
        return False


def require(fits: bool, value: Any) -> Any:
    """Return a value, or raise ValueError if it does not fit."""
    if not fits:
        raise ValueError(quote(value))
    return value
