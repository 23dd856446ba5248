"""What is told of a machine: facts, for people and for programs, and what is broken."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from llamatrain.config.units import Size


class Fact(NamedTuple):
    name: str
    value: Any  # for programs
    words: str


class Problem(NamedTuple):
    """What is broken, and what would do."""

    what: str
    cure: str


Told = Iterator[Fact | Problem]


def fact(name: str, value: Any, words: str = "") -> Fact:
    return Fact(name, value, words or ("none" if value is None or value == [] else str(value)))


def of_bytes(name: str, nbytes: int | None, more: str = "") -> Fact:
    return Fact(name, nbytes, "not told here" if nbytes is None else f"{size(nbytes)}{more}")


def size(nbytes: int) -> str:
    return Size(nbytes).text
