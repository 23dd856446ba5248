"""What this package stands on: each dependency, the versions of it that will do, and the one that is there."""

import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from typing import NamedTuple

from llamatrain.compiler.prebuilt import PACKAGE

NAME = "llamatrain"
EXTRAS = "compile", "mpi"  # those that people install; the others are for who works on it
REQUIREMENT = re.compile(r"\s*([\w.-]+)\s*([^;\s][^;]*)?(?:;.*extra\s*==\s*[\"']([\w-]+)[\"'].*)?")
NUMBERS = re.compile(r"\d+(?:\.\d+)*")


class Requirement(NamedTuple):
    name: str
    bounds: str  # as in >=2.0,<3
    extra: str  # it is installed with; empty: always

    @property
    def version(self) -> str | None:
        return installed_version(self.name)

    @property
    def pip_argument(self) -> str:
        """What pip is told."""
        return f"'{NAME}[{self.extra}]'" if self.extra else f"'{self.name}{self.bounds}'"

    def accepts(self, version: str) -> bool:
        """Of bounds only those that are here: at least, and below."""
        for bound in filter(None, self.bounds.split(",")):
            number, least = parse_version(bound), parse_version(version)
            if (bound.strip().startswith(">=") and least < number) or (
                bound.strip().startswith("<") and least >= number
            ):
                return False
        return True


def installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def parse_version(version: str) -> tuple[int, ...]:
    """As many as decide: 2.0 and 2 are one."""
    match = NUMBERS.search(version)
    numbers = [int(each) for each in match[0].split(".")] if match else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def list_requirements() -> list[Requirement]:
    """Of the sources where there is a clone, else of what was installed."""
    requirements = [
        Requirement(match[1], (match[2] or "").replace(" ", ""), match[3] or "")
        for match in map(REQUIREMENT.fullmatch, read_requirements())
        if match
    ]
    return [
        requirement for requirement in requirements if not requirement.extra or requirement.extra in EXTRAS
    ]


def read_requirements() -> Iterator[str]:
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
