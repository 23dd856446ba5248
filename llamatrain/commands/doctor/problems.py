"""Facts about a machine, for people and programs, and problems."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from llamatrain.config.units import Size


class Fact(NamedTuple):
    """A named fact, as a value and as text."""

    name: str
    value: Any  # for programs
    text: str


class Problem(NamedTuple):
    """A problem and its remedy."""

    problem: str
    remedy: str


Findings = Iterator[Fact | Problem]


def make_fact(name: str, value: Any, words: str = "") -> Fact:
    """Return a fact; its text is the value unless given."""
    return Fact(name, value, words or ("none" if value is None or value == [] else str(value)))


def bytes_fact(name: str, nbytes: int | None, more: str = "") -> Fact:
    """Return a fact about a number of bytes."""
    return Fact(name, nbytes, "unknown" if nbytes is None else f"{format_size(nbytes)}{more}")


def format_size(nbytes: int) -> str:
    """Return a number of bytes as text."""
    return Size(nbytes).text
