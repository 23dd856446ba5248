"""What this package stands on: each dependency, the versions of it that will do, and the one that is there."""

import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from typing import NamedTuple

from llamatrain.compiler.prebuilt import PACKAGE

NAME = "llamatrain"
EXTRAS = "compile", "mpi"  # those that people install; the others are for who works on it
FORM = re.compile(r"\s*([\w.-]+)\s*([^;\s][^;]*)?(?:;.*extra\s*==\s*[\"']([\w-]+)[\"'].*)?")
NUMBERS = re.compile(r"\d+(?:\.\d+)*")


class Requirement(NamedTuple):
    name: str
    bounds: str  # as in >=2.0,<3
    extra: str  # it is installed with; empty: always

    @property
    def version(self) -> str | None:
        return version_of(self.name)

    @property
    def whole(self) -> str:
        """What pip is told."""
        return f"'{NAME}[{self.extra}]'" if self.extra else f"'{self.name}{self.bounds}'"

    def suits(self, version: str) -> bool:
        """Of bounds only those that are here: at least, and below."""
        for bound in filter(None, self.bounds.split(",")):
            number, least = numbers_of(bound), numbers_of(version)
            if (bound.strip().startswith(">=") and least < number) or (
                bound.strip().startswith("<") and least >= number
            ):
                return False
        return True


def version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def numbers_of(version: str) -> tuple[int, ...]:
    """As many as decide: 2.0 and 2 are one."""
    found = NUMBERS.search(version)
    numbers = [int(each) for each in found[0].split(".")] if found else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def requirements() -> list[Requirement]:
    """Of the sources where there is a clone, else of what was installed."""
    found = [
        Requirement(match[1], (match[2] or "").replace(" ", ""), match[3] or "")
        for match in map(FORM.fullmatch, told())
        if match
    ]
    return [each for each in found if not each.extra or each.extra in EXTRAS]


def told() -> Iterator[str]:
    try:
        project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
        if project["name"] != NAME:
            raise LookupError
        yield from project["dependencies"]
        for extra, each in project["optional-dependencies"].items():
            yield from (f'{one}; extra == "{extra}"' for one in each)
    except (OSError, ValueError, LookupError):
        try:
            yield from metadata.requires(NAME) or ()
        except metadata.PackageNotFoundError:
            return
