"""What is told of a machine: facts, for people and for programs, and what is broken."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from llamatrain.config.units import Size


class Fact(NamedTuple):
    name: str
    value: Any  # for programs
    text: str


class Problem(NamedTuple):
    """What is broken, and what would do."""

    problem: str
    remedy: str


Findings = Iterator[Fact | Problem]


def make_fact(name: str, value: Any, words: str = "") -> Fact:
    return Fact(name, value, words or ("none" if value is None or value == [] else str(value)))


def bytes_fact(name: str, nbytes: int | None, more: str = "") -> Fact:
    return Fact(name, nbytes, "not told here" if nbytes is None else f"{format_size(nbytes)}{more}")


def format_size(nbytes: int) -> str:
    return Size(nbytes).text
